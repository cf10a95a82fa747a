"""Requests that are added between the steps of an engine."""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_prompts() -> list[tuple[str, SamplingParams]]:
    return [
        ("How do you list files?", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("Hello", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is a file?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]


def process(engine: LLMEngine, prompts: list[tuple[str, SamplingParams]]) -> None:
    request_id = 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, params = prompts.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                print(f"request {output.request_id} of {output.prompt!r} has ended")


def main(args: argparse.Namespace) -> None:
    process(LLMEngine.from_engine_args(EngineArgs.from_cli_args(args)), create_prompts())


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="step an engine")
    main(EngineArgs.add_cli_args(parser).parse_args())
