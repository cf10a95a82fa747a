"""Requests for a model and for two adapters in one engine; token ids as prompts."""

import sys

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.utils import random_uuid


def main(model: str, adapter: str) -> None:
    args = EngineArgs(model=model, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=8)
    engine = LLMEngine.from_engine_args(args)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=engine.get_tokenizer().encode("What does os.path.join do?"))
    requests = [None, LoRARequest("first", 1, adapter), LoRARequest("second", 2, adapter)]
    ids = [engine.add_request(random_uuid(), prompt, params, lora_request=request) for request in requests]
    texts = {}
    while engine.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
    for request_id in ids:
        print(repr(texts[request_id]))


if __name__ == "__main__":
    main(*sys.argv[1:])
