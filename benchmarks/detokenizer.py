"""Prints the cost of a generated token in the front end: detokenization, stop strings, outputs, streams.

    python benchmarks/detokenizer.py [--tokens 200000] [--rows 256] [--steps 200]

Each call gets one token, as in decoding. `library` is the DecodeStream of the tokenizers package. The target for
everything in front of the engine, HTTP included, is 10,000 tokens per second on one core: 100 us per token.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

from tokenizers.decoders import DecodeStream

import quire.demo
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.echo_client import EchoClient
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.replica import Replica
from quire.frontend.text.pipeline import TextPipeline
from quire.frontend.tokenizer import Tokenizer
from quire.messages import RequestDelta
from quire.sampling_params import RequestOutputKind, SamplingParams

TEXT = "The quick brown fox jumps over the lazy dog. Größe, naïve, 你好, 😀!\n"
STOPS = ["\n\n\n", "User:", "<|end|>"]


def timed(name: str, num_tokens: int, work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    report(name, num_tokens, time.perf_counter() - start)


def report(name: str, num_tokens: int, seconds: float) -> None:
    print(f"{name:<34} {1e6 * seconds / num_tokens:8.2f} us/token {num_tokens / seconds:12,.0f} tokens/s")


def pipeline_lines(tokenizer: Tokenizer, num_tokens: int) -> None:
    once = tokenizer.encode(TEXT)
    token_ids = (once * (num_tokens // len(once) + 1))[:num_tokens]

    def library() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in token_ids:
            stream.step(tokenizer.backend, token_id)

    def pipeline(stop: list[str]) -> None:
        text = TextPipeline(tokenizer.new_detokenizer(), stop)
        for token_id in token_ids:
            text.push((token_id,))

    timed("library", num_tokens, library)
    timed("text pipeline", num_tokens, lambda: pipeline([]))
    timed("text pipeline, 3 stop strings", num_tokens, lambda: pipeline(STOPS))
    timed("whole text at once", num_tokens, lambda: tokenizer.decode(token_ids))


def output_lines(tokenizer: Tokenizer, num_rows: int, num_steps: int) -> None:
    inputs = InputProcessor(tokenizer, ModelLimits(10**6, tokenizer.vocab_size))
    token_ids = tokenizer.encode(TEXT)
    for kind in RequestOutputKind:
        outputs = OutputProcessor(tokenizer)
        params = SamplingParams(max_tokens=10**5, output_kind=kind)
        for row in range(num_rows):
            outputs.add(inputs.process(f"r{row}", TEXT, params))
        steps = [
            [RequestDelta(f"r{row}", [token_ids[(step + row) % len(token_ids)]]) for row in range(num_rows)]
            for step in range(num_steps)
        ]
        start = time.perf_counter()
        for deltas in steps:
            outputs.process(deltas)
        report(f"output processor, {kind.name.lower()}", num_rows * num_steps, time.perf_counter() - start)


async def engine_line(tokenizer: Tokenizer, num_rows: int, num_steps: int) -> None:
    inputs = InputProcessor(tokenizer, ModelLimits(10**6, tokenizer.vocab_size))
    client = EchoClient(max_model_len=10**6, max_num_seqs=num_rows)
    engine = AsyncEngine([Replica(client, OutputProcessor(tokenizer))], inputs)
    engine.start()
    await engine.wait_ready()
    params = SamplingParams(max_tokens=num_steps, output_kind=RequestOutputKind.DELTA)

    async def read(request_id: str) -> int:
        stream = engine.generate(TEXT, params, request_id)
        return sum([len(output.outputs[0].token_ids) async for output in stream])

    start = time.perf_counter()
    counts = await asyncio.gather(*(read(f"r{row}") for row in range(num_rows)))
    report("async engine with its echo", sum(counts), time.perf_counter() - start)
    await engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_folder(quire.demo.path("target"))
    pipeline_lines(tokenizer, args.tokens)
    output_lines(tokenizer, args.rows, args.steps)
    asyncio.run(engine_line(tokenizer, args.rows, args.steps))


if __name__ == "__main__":
    main()
