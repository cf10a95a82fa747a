"""Texts as they grow, from an engine in a process of its own."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(
        max_tokens=6, temperature=0.8, seed=42, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    count = 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        count += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            print(f"{request_id}: {count} tokens")
            break


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], enforce_eager=True))
    try:
        await asyncio.gather(*(stream(engine, "How do you list files?", f"stream-{n}") for n in range(2)))
        endless = SamplingParams(max_tokens=1000, ignore_eos=True)
        async for _ in engine.generate("Hello", endless, "endless"):
            await engine.abort("endless")
        print("aborted")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
