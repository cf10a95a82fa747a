"""Structured output of other engines, for the option --peer of benchmarks/structured_output.py.

    python constraining.py vllm MODEL [--requests 32]
    python constraining.py llama-server BINARY MODEL.gguf [--requests 32]

The script first writes {"ready": true}. Then it answers each line of the standard input with a line. A question
{"prompts": [text], "schemas": [schema or null], "num_tokens": length of each answer} asks for greedy answers of exactly
this length. Its answer is {"seconds": the time for all of them at once}. A question with "seeds" instead of "prompts"
asks for one answer per seed, at temperature 1, all with the same schema; these answers may end earlier. Its answer is
{"answers": [the text, or {"refused": why}, or null for an answer that was cut off]}. The script needs neither Quire nor
its environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llama_cpp_server import LlamaCppServer

CONTEXT = 1024  # tokens of a request
PROMPT = "Data: "
# A request is the prompt, the schema and options. An answer is the text, None if it was cut off, or why it was refused.
Asked = tuple[str, Any, dict[str, Any]]
Answer = str | None | dict[str, str]
Generate = Callable[[list[Asked]], list[Answer]]


def vllm(arguments: argparse.Namespace) -> Generate:
    """vLLM's offline API."""
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        arguments.model, max_model_len=CONTEXT, max_num_seqs=arguments.requests, enable_prefix_caching=False, seed=0
    )

    def generate(asked: list[Asked]) -> list[Answer]:
        params = []
        for _, schema, options in asked:
            constraint = None if schema is None else StructuredOutputsParams(json=schema)
            params.append(SamplingParams(structured_outputs=constraint, **options))
        outputs = llm.generate([prompt for prompt, _, _ in asked], params, use_tqdm=False)
        found = (output.outputs[0] for output in outputs)
        return [each.text if each.finish_reason == "stop" else None for each in found]

    def or_refusal(asked: list[Asked]) -> list[Answer]:
        try:
            return generate(asked)
        except VLLMValidationError as error:  # no request was added, because all of them have this schema
            return [{"refused": str(error)[:200]}] * len(asked)

    return or_refusal


def llama_server(arguments: argparse.Namespace) -> Generate:
    """llama.cpp's server, one slot for each request."""
    sizes = (arguments.requests, CONTEXT, arguments.threads)
    server = LlamaCppServer(arguments.binary, arguments.model, *sizes)
    threads = ThreadPoolExecutor(arguments.requests)

    def one(asked: Asked) -> Answer:
        prompt, schema, options = asked
        body = {"prompt": prompt, "n_predict": options["max_tokens"]}
        body |= {name: value for name, value in options.items() if name != "max_tokens"}
        if schema is not None:
            body["json_schema"] = schema
        try:
            found = server.complete(body)
        except urllib.error.HTTPError as error:
            return {"refused": error.read().decode(errors="replace")[:200]}
        assert found["tokens_predicted"] == options["max_tokens"] or not options.get("ignore_eos"), found
        return found["content"] if found["stop_type"] == "eos" else None

    return lambda asked: list(threads.map(one, asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = parser.add_subparsers(required=True)
    for name, start in (("vllm", vllm), ("llama-server", llama_server)):
        engine = engines.add_parser(name)
        if start is llama_server:
            engine.add_argument("binary")
            engine.add_argument("--threads", type=int, default=2)
        engine.add_argument("model")
        engine.add_argument("--requests", type=int, default=32, help="the most requests at once")
        engine.set_defaults(start=start)
    arguments = parser.parse_args()
    generate = arguments.start(arguments)
    generate([(PROMPT, None, {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True})])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        schemas, num_tokens = asked["schemas"], asked["num_tokens"]
        if seeds := asked.get("seeds"):
            sampled = {"temperature": 1.0, "max_tokens": num_tokens}
            pairs = zip(schemas, seeds, strict=True)
            answers = generate([(PROMPT, schema, {**sampled, "seed": seed}) for schema, seed in pairs])
            print(json.dumps({"answers": answers}), flush=True)
            continue
        greedy = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
        started = time.perf_counter()
        answers = generate([(*each, greedy) for each in zip(asked["prompts"], schemas, strict=True)])
        seconds = time.perf_counter() - started
        if refused := [each for each in answers if isinstance(each, dict)]:
            sys.exit(f"a schema was refused: {refused[0]}")
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
