"""`quire complete`: let a running server continue a text in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.client import Client, add_client_flags
from quire.screen.terminal import write_answer


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("complete", help="continue a text on a running server", allow_abbrev=False)
    add_client_flags(parser)
    parser.add_argument("--max-tokens", type=int, help="longest continuation (default: the server's)")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="continue one prompt, print it, and leave")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    client = Client(args.url, model=args.model_name, api_key=args.client_key)
    if args.quick is not None:
        _continue(client, args.quick, args.max_tokens)
        return 0
    print(f"Continuing text with {client.name}. Ctrl-D leaves.")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        if text:
            _continue(client, text, args.max_tokens)


def _continue(client: Client, prompt: str, max_tokens: int | None) -> None:
    body = {"prompt": prompt} | ({"max_tokens": max_tokens} if max_tokens is not None else {})
    for chunk in client.stream("/completions", body):
        for choice in chunk["choices"]:
            write_answer(choice["text"])
    print()
