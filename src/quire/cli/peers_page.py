"""docs/coming-from.md from the tables of other servers: `python -m quire.cli.peers_page > docs/coming-from.md`."""

from __future__ import annotations

from collections.abc import Iterator

from quire.compat.peers import PEERS, Peer, PeerFlag
from quire.compat.table import as_flag

_HEAD = """\
# Coming from another server

This page says what becomes of the flags of llama.cpp, Ollama, SGLang and TGI. [vllm.md](vllm.md) does so for vLLM. It
is made by `python -m quire.cli.peers_page` from the tables that `quire explain` answers with.

```
quire explain --llama-server 'llama-server -m model.gguf -c 8192 -np 4'
quire explain --modelfile Modelfile
quire explain --sglang 'python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B'
quire explain --tgi 'text-generation-launcher --model-id Qwen/Qwen3-0.6B'
```

Each prints every flag with its answer, and then the same command for Quire. Nothing is executed, loaded or downloaded.
`-` reads from standard input. The exit codes mean the same as for
[`quire explain --vllm`](vllm.md#what-becomes-of-a-command).
"""
_INTRODUCTIONS = {
    "llama.cpp": """\
GGUF files are read as they are ([quantization.md](quantization.md)); clients of `/v1/chat/completions`,
`/v1/completions`, `/v1/models`, `/tokenize` and `/detokenize` stay as they are. `/completion`, `/infill`, `/slots` and
`/props` do not exist: use `/v1/completions` with its field `suffix`, `GET /v1/steps` and `GET /v1/config`. Options that
most people set for speed have no counterpart, because Quire chooses them: slots, batch sizes, flash attention, threads.
""",
    "Ollama": """\
Quire reads a Modelfile's parameters, and GGUF files. It does not read Ollama's registry: take the same model from the
hub. Clients use OpenAI's API (`/v1/chat/completions`); `/api/generate` and `/api/chat` do not exist. A server has one
model; `keep_alive` and loading on demand do not exist. Of Ollama's variables, `OLLAMA_HOST` is `--host` and `--port`,
`OLLAMA_NUM_PARALLEL` is `--max-num-seqs`, `OLLAMA_MAX_QUEUE` is `--max-num-queued-reqs`, `OLLAMA_CONTEXT_LENGTH` is
`--max-model-len`, `OLLAMA_KV_CACHE_TYPE=q8_0` is `--kv-cache-dtype int8` and `OLLAMA_ORIGINS` is `--allowed-origins`.
""",
    "SGLang": """\
Clients of OpenAI's API stay as they are. `/generate` does not exist: use `/v1/completions`. `/get_server_info` is
`GET /v1/config`, and `/flush_cache` is `POST /reset_prefix_cache` ([apis.md](apis.md#routes-for-development)). The
prefix cache works by blocks rather than by a tree of tokens, and is on by default.
""",
    "TGI": """\
TGI's Messages API is OpenAI's chat, so these clients stay as they are. `/generate` and `/generate_stream` do not exist:
use `/v1/completions`. `grammar` of a request is `structured_outputs` ([structured_output.md](structured_output.md)),
`max_new_tokens` is `max_tokens`, and `do_sample` false is `temperature` 0.
""",
}
_STATUS = {"accepted": "no effect", "refused": "refused"}


def render() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(line for peer in PEERS for line in _section(peer))])


def _section(peer: Peer) -> Iterator[str]:
    name = "Modelfile" if peer.program is None else "flag"
    yield f"## {peer.title}\n"
    yield _INTRODUCTIONS[peer.title]
    yield f"| {name} | Quire | |"
    yield "|---|---|---|"
    for flag in peer.flags:
        text = flag.text if flag.kind != "refused" else f"{flag.text}. {flag.instead}"
        spelled = ", ".join(f"`{_spelled(word, peer)}`" for word in flag.flags)
        yield f"| {spelled} | {_here(flag)} | {text} |"
    yield ""


def _spelled(flag: str, peer: Peer) -> str:
    if peer.program is not None:
        return flag
    name = flag.lstrip("-").replace("-", "_")
    return name.upper() if name in ("from", "template", "system", "adapter", "license", "message", "requires") else name


def _here(flag: PeerFlag) -> str:
    if flag.kind != "translated":
        return _STATUS[flag.kind]
    setting, _, key = flag.to.partition(".")
    return f"`{as_flag(setting)}`" + (f", key `{key}`" if key else "")


if __name__ == "__main__":
    print(render(), end="")
