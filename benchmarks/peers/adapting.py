"""Other engines with adapters, for the option --peer of benchmarks/lora_peers.py.

    python adapting.py vllm MODEL ADAPTERS [key=value ...] [--context 1024]
    python adapting.py llama-server BINARY MODEL.gguf ADAPTERS [--context 1024] [--threads 2]

ADAPTERS: the folder that benchmarks/lora_peers.py --write makes, with a PEFT adapter of one rank in each folder. A line
on the standard input asks: {"prompts": [[token ids]], "adapters": [name or null], "num_tokens": of each}. A line on the
standard output answers: {"seconds": for all of them at once}; the first line is {"ready": true}. Decoding is greedy.
The script needs neither Quire nor its environment.

vLLM takes the adapters as they are; options like enforce_eager=true go to its LLM. llama.cpp wants GGUF, with two
scripts of its repository: `python convert_hf_to_gguf.py MODEL --outtype bf16`, and for each adapter
`python convert_lora_to_gguf.py ADAPTERS/NAME --base MODEL --outtype bf16 --outfile ADAPTERS/NAME.gguf`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llama_cpp_server import LlamaCppServer

Generate = Callable[[list[list[int]], list[str | None], int], Any]


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def vllm(arguments: argparse.Namespace, folders: list[Path]) -> Generate:
    """vLLM, which takes the adapters of a batch together."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    ranks = [json.loads((folder / "adapter_config.json").read_text())["r"] for folder in folders]
    options = {name: as_json(value) for name, value in (option.split("=", 1) for option in arguments.options)}
    llm = LLM(
        model=arguments.model,
        max_model_len=arguments.context,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=len(folders),
        max_lora_rank=max(ranks),
        **options,
    )
    requests = {folder.name: LoRARequest(folder.name, 1 + index, str(folder)) for index, folder in enumerate(folders)}

    def generate(prompts: list[list[int]], adapters: list[str | None], num_tokens: int) -> Any:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        lora = None if not any(adapters) else [name and requests[name] for name in adapters]
        outputs = llm.generate(given, params, lora_request=lora, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


def llama_server(arguments: argparse.Namespace, folders: list[Path]) -> Generate:
    """llama.cpp's server, one slot for each adapter. Requests name their adapter; its slots batch only equal ones."""
    files = ",".join(str(folder.with_name(folder.name + ".gguf")) for folder in folders)
    sizes = (len(folders), arguments.context, arguments.threads)
    server = LlamaCppServer(arguments.binary, arguments.model, *sizes, "--lora", files, "--lora-init-without-apply")
    threads = ThreadPoolExecutor(len(folders))
    ids = {folder.name: index for index, folder in enumerate(folders)}

    def one(prompt: list[int], adapter: str | None, num_tokens: int) -> None:
        lora = [] if adapter is None else [{"id": ids[adapter], "scale": 1.0}]
        server.complete_greedily(prompt, num_tokens, lora=lora)

    def generate(prompts: list[list[int]], adapters: list[str | None], num_tokens: int) -> Any:
        return list(threads.map(one, prompts, adapters, [num_tokens] * len(prompts)))

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = parser.add_subparsers(required=True)
    for name, start in {"vllm": vllm, "llama-server": llama_server}.items():
        engine = engines.add_parser(name)
        if start is llama_server:
            engine.add_argument("binary")
            engine.add_argument("--threads", type=int, default=2)
        engine.add_argument("model")
        engine.add_argument("adapters", type=Path)
        engine.add_argument("--context", type=int, default=1024, help="most tokens of a request")
        if start is vllm:
            engine.add_argument("options", nargs="*", metavar="key=value")
        engine.set_defaults(start=start)
    arguments = parser.parse_args()
    folders = sorted(path for path in arguments.adapters.iterdir() if path.is_dir())
    generate = arguments.start(arguments, folders)
    generate([[10, 11, 12]] * len(folders), [folder.name for folder in folders], 4)  # reads the adapters
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        generate(asked["prompts"], asked["adapters"], asked["num_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
