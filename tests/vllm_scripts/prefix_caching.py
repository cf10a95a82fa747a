"""Two questions with one long beginning: the second finds it in the cache."""

import sys

from vllm import LLM, SamplingParams

TABLE = "".join(f"row {number} holds {number * number}\n" for number in range(40))


def main():
    llm = LLM(model=sys.argv[1], enable_prefix_caching=True)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for row in (3, 7):
        (output,) = llm.generate(TABLE + f"What does row {row} hold?", sampling_params=params)
        print(output.num_cached_tokens)
    llm.reset_prefix_cache()
    print(llm.generate(TABLE, params)[0].num_cached_tokens)


if __name__ == "__main__":
    main()
