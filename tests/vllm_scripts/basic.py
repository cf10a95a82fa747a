"""Prompts in, texts out."""

import sys

from vllm import LLM, SamplingParams

PROMPTS = ["How do you list files?", "What is the capital of France?"]


def main():
    llm = LLM(model=sys.argv[1])
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
