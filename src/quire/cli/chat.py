"""`quire chat`: talk to a running server in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.client import Client, add_client_flags


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("chat", help="chat with a running server", allow_abbrev=False)
    add_client_flags(parser)
    parser.add_argument("--system-prompt", help="text of the system message")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, and leave")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    client = Client(args)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    if args.quick is not None:
        _turn(client, messages, args.quick)
        return 0
    print(f"Chatting with {client.model}. Ctrl-D leaves.")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        if text.strip():
            _turn(client, messages, text)


def _turn(client: Client, messages: list[dict[str, str]], text: str) -> None:
    messages.append({"role": "user", "content": text})
    answer = ""
    for chunk in client.stream("/chat/completions", {"messages": messages}):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            answer += piece
            print(piece, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})
