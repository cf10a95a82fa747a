"""Speculation of other engines, and the engines without it, for the option --peer of benchmarks/speculation.py.

    python speculating.py openvino MODEL [--draft MODEL | --lookup] [--drafts 4] [--requests 8]
    python speculating.py llama-server BINARY MODEL.gguf [--draft MODEL.gguf | --lookup] [--drafts 4] [--requests 8]
    python speculating.py llama-cpp-python MODEL.gguf [--requests 8] [--kv Q8_0]
    python speculating.py vllm MODEL [--draft MODEL | --lookup] [--drafts 4] [--requests 8] [--ranks 2]
    python speculating.py quire MODEL [--quantization int8] [--requests 8]
    python speculating.py serve "COMMAND --port {port}" [--requests 8]

The script first writes {"ready": true}. Then it answers each line of the standard input with a line: the question is
{"prompts": [[token ids]], "num_tokens": length of each answer}, the answer is {"seconds": the time for all prompts at
once}. Decoding is greedy. The script needs neither Quire nor its environment. With `quire`, it runs another build of
Quire, for example an earlier commit with PYTHONPATH=THAT_COMMIT/src. With `serve`, it starts any server of the OpenAI
API, and asks it over HTTP for all prompts at once.

The models are those that benchmarks/speculation.py writes, converted to the engine's own format. For OpenVINO GenAI,
`optimum-cli export openvino --model FOLDER/chat --task text-generation-with-past --weight-format fp16 OUT` (or int4)
converts them. For llama.cpp, `python convert_hf_to_gguf.py FOLDER/chat --outtype bf16` from its repository converts
them, and `llama-quantize` quantizes them to Q4_0.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llama_cpp_server import LlamaCppServer, wait_until_ready

LOOKUP_TOKENS = 3  # tokens of the pattern that is searched, as in Quire
Generate = Callable[[list[list[int]], int], Any]


def openvino(arguments: argparse.Namespace) -> Generate:
    """OpenVINO GenAI with its paged attention."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs, scheduling.enable_prefix_caching = 3, arguments.requests, False
    options: dict[str, Any] = {"scheduler_config": scheduling}
    if arguments.precision:
        options["INFERENCE_PRECISION_HINT"] = arguments.precision
    if arguments.draft:
        options["draft_model"] = genai.draft_model(arguments.draft, "CPU")
    if arguments.lookup:
        options["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(arguments.model, "CPU", **options)

    def generate(prompts: list[list[int]], num_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        if arguments.draft or arguments.lookup:
            config.num_assistant_tokens = arguments.drafts
        if arguments.lookup:
            config.max_ngram_size = LOOKUP_TOKENS
        width = max(map(len, prompts))
        padded, mask = np.zeros((2, len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        return pipeline.generate(genai.TokenizedInputs(ov.Tensor(padded), ov.Tensor(mask)), config)

    return generate


def llama_server(arguments: argparse.Namespace) -> Generate:
    """llama.cpp's server, one slot for each request."""
    options: list[str] = []
    if arguments.draft:
        options += ["--spec-type", "draft-simple", "--spec-draft-model", arguments.draft]
        options += ["--spec-draft-n-max", str(arguments.drafts), "--spec-draft-threads", str(arguments.threads)]
    if arguments.lookup:
        options += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(LOOKUP_TOKENS)]
        options += ["--spec-ngram-simple-size-m", str(arguments.drafts)]
    sizes = (arguments.requests, arguments.context, arguments.threads)
    server = LlamaCppServer(arguments.binary, arguments.model, *sizes, *options)
    threads = ThreadPoolExecutor(arguments.requests)

    def generate(prompts: list[list[int]], num_tokens: int) -> Any:
        return list(threads.map(server.complete_greedily, prompts, [num_tokens] * len(prompts)))

    return generate


def llama_library(arguments: argparse.Namespace) -> Generate:
    """llama.cpp's library through llama-cpp-python: all requests in one context, without drafts."""
    import ctypes

    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(arguments.model.encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = arguments.context * arguments.requests, arguments.requests
    params.n_threads = params.n_threads_batch = arguments.threads
    if arguments.kv:  # quantized values need flash attention
        params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{arguments.kv}")
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = llama_cpp.llama_init_from_model(model, params)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def step(rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """The most probable tokens by sequence. A row has the token, the position, the sequence, and whether logits are
        wanted.
        """
        for index, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        batch.n_tokens = len(rows)
        if (code := llama_cpp.llama_decode(context, batch)) != 0:
            sys.exit(f"llama_decode: {code}")
        found = {}
        for index, (_, _, sequence, is_wanted) in enumerate(rows):
            if is_wanted:
                logits = ctypes.cast(
                    llama_cpp.llama_get_logits_ith(context, index), ctypes.POINTER(ctypes.c_float * vocab_size)
                )
                found[sequence] = int(np.frombuffer(logits.contents, dtype=np.float32).argmax())
        return found

    def generate(prompts: list[list[int]], num_tokens: int) -> Any:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for begin in range(0, len(rows), params.n_batch):
            last |= step(rows[begin : begin + params.n_batch])
        for behind in range(num_tokens - 1):
            last = step([(token, len(prompts[s]) + behind, s, True) for s, token in last.items()])

    return generate


def vllm(arguments: argparse.Namespace) -> Generate:
    """vLLM's offline engine; with drafts without compilation."""
    from vllm import LLM, SamplingParams

    drafter: dict[str, Any] = {}
    if arguments.draft:
        drafter = {"method": "draft_model", "model": arguments.draft}
    if arguments.lookup:
        drafter = {"method": "ngram", "prompt_lookup_max": LOOKUP_TOKENS, "prompt_lookup_min": LOOKUP_TOKENS}
    engine = LLM(
        arguments.model,
        max_model_len=arguments.context,
        max_num_seqs=arguments.requests,
        enable_prefix_caching=False,
        tensor_parallel_size=arguments.ranks,
        distributed_executor_backend="mp" if arguments.ranks > 1 else None,
        enforce_eager=bool(drafter),
        speculative_config=drafter | {"num_speculative_tokens": arguments.drafts} if drafter else None,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        return engine.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)

    return generate


def another_quire(arguments: argparse.Namespace) -> Generate:
    """The build of Quire that this Python finds."""
    from quire import LLM, SamplingParams

    engine = LLM(
        arguments.model,
        dtype="bfloat16",
        quantization=arguments.quantization,
        max_model_len=arguments.context,
        max_num_seqs=arguments.requests,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        return engine.generate(prompts, params, use_tqdm=False)

    return generate


def server(arguments: argparse.Namespace) -> Generate:
    """A server of the OpenAI API, which streams its answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(shlex.split(arguments.model.format(port=port)), stdout=sys.stderr)
    atexit.register(process.terminate)
    url = f"http://127.0.0.1:{port}"
    wait_until_ready(url, process)
    threads = ThreadPoolExecutor(arguments.requests)

    def complete(prompt: list[int], num_tokens: int) -> None:
        asked = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        asked |= {"stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            events = [line for line in response if line.startswith(b"data: {")]
        found = json.loads(events[-1].removeprefix(b"data: "))["usage"]["completion_tokens"]
        assert found == num_tokens, f"{found} tokens, {num_tokens} asked for"

    def generate(prompts: list[list[int]], num_tokens: int) -> Any:
        return list(threads.map(complete, prompts, [num_tokens] * len(prompts)))

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = parser.add_subparsers(required=True)
    starts = {"openvino": openvino, "llama-server": llama_server, "llama-cpp-python": llama_library, "vllm": vllm}
    starts |= {"quire": another_quire, "serve": server}
    for name, start in starts.items():
        engine = engines.add_parser(name)
        if start is llama_server:
            engine.add_argument("binary")
        if start in (llama_server, llama_library):
            engine.add_argument("--threads", type=int, default=2)
        engine.add_argument("model", metavar="COMMAND" if start is server else "MODEL")
        if start is another_quire:
            engine.add_argument("--quantization")
        elif start is llama_library:
            engine.add_argument("--kv", metavar="TYPE", help="ggml's type of keys and values, such as Q8_0")
        elif start is not server:
            drafter = engine.add_mutually_exclusive_group()
            drafter.add_argument("--draft", metavar="MODEL", help="a model that drafts")
            drafter.add_argument("--lookup", action="store_true", help="take drafts from the text")
            engine.add_argument("--drafts", type=int, default=4, help="the most drafts of a request in a step")
        engine.add_argument("--requests", type=int, default=8, help="the most requests at once")
        if start is openvino:
            engine.add_argument("--precision", help="of the arithmetic, such as f32; default: what OpenVINO chooses")
        elif start is not server:
            engine.add_argument("--context", type=int, default=1024, help="the most tokens of a request")
        if start is vllm:
            engine.add_argument("--ranks", type=int, default=1, help="processes that share the model")
        engine.set_defaults(start=start)
    arguments = parser.parse_args()
    generate = arguments.start(arguments)
    generate([[10, 11, 12]], 4)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        generate(asked["prompts"], asked["num_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
