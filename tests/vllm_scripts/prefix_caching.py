"""Two questions with one long beginning: the second finds it in the cache, and the answers equal those without a
cache.
"""

import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

TABLE = "".join(f"row {number} holds {number * number}\n" for number in range(40))
PROMPTS = [TABLE + f"What does row {row} hold?" for row in (3, 7)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


def main():
    llm = LLM(model=sys.argv[1], enable_prefix_caching=False, gpu_memory_utilization=0.1)
    plain = llm.generate(PROMPTS, PARAMS)
    del llm
    cleanup_dist_env_and_memory()

    llm = LLM(model=sys.argv[1], enable_prefix_caching=True, gpu_memory_utilization=0.1)
    cached = [llm.generate(prompt, sampling_params=PARAMS)[0] for prompt in PROMPTS]
    print([output.outputs[0].text for output in plain] == [output.outputs[0].text for output in cached])
    for output in cached:
        print(output.num_cached_tokens)
    llm.reset_prefix_cache()
    print(llm.generate(TABLE, PARAMS)[0].num_cached_tokens)


if __name__ == "__main__":
    main()
