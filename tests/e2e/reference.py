"""transformers on the demo model in float32: the tokens and log probabilities that Quire must give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

import quire.demo
from quire.frontend.tokenizer import Tokenizer

EOS = 2
QUESTIONS = (
    "What does os.path.join do?",
    "how to sort a list",
    "Which module provides heapq.heappush?",
    "Explain functools.lru_cache in Python.",
)
TEXTS = ("`json.dumps(obj)`: ", "Hello", "The function `os.path.")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(quire.demo.path())


@cache
def chat_prompts() -> tuple[str, ...]:
    return tuple(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS)


@cache
def prompts() -> tuple[str, ...]:
    """Questions, which end in EOS, and texts, which do not soon."""
    return chat_prompts() + TEXTS


@cache
def _model() -> torch.nn.Module:
    import transformers

    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(quire.demo.path(), dtype=torch.float32)
    return model.eval()


_answers: dict[str, list[int]] = {}  # by prompt: the tokens that are known


def greedy(prompt: str, max_tokens: int) -> list[int]:
    """transformers' own generate(), without the prompt; ends with EOS if that comes. It goes on from what is known."""
    known = _answers.setdefault(prompt, [])
    if len(known) < max_tokens and known[-1:] != [EOS]:
        ids = torch.tensor([tokenizer().encode(prompt) + known])
        output = _model().generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens - len(known),
            do_sample=False,
            pad_token_id=0,
        )
        known += output[0, ids.shape[1] :].tolist()
    return known[:max_tokens]


@torch.inference_mode()
def logprobs(token_ids: Sequence[int]) -> Tensor:
    """Natural log probabilities [position, vocabulary] of the token after each position."""
    return torch.log_softmax(_model()(torch.tensor([list(token_ids)])).logits[0].double(), dim=-1)


@torch.inference_mode()
def beam_search(prompt_ids: Sequence[int], width: int, max_tokens: int, length_penalty: float) -> list[list[int]]:
    """Beams over the whole vocabulary, by the definition: every prefix is scored anew."""
    num_prompt = len(prompt_ids)
    running: list[tuple[float, list[int]]] = [(0.0, list(prompt_ids))]
    finished: list[tuple[float, list[int]]] = []

    def rank(item: tuple[float, list[int]]) -> float:
        length = len(item[1]) - (item[1][-1] == EOS)
        return item[0] / length**length_penalty

    for _ in range(max_tokens):
        grown = []
        logits = _model()(torch.tensor([tokens for _, tokens in running])).logits[:, -1]
        best = torch.log_softmax(logits.double(), dim=-1).topk(2 * width)
        for (score, tokens), values, indices in zip(running, best.values.tolist(), best.indices.tolist(), strict=True):
            grown += [(score + value, [*tokens, token]) for value, token in zip(values, indices, strict=True)]
        finished += [item for item in grown if item[1][-1] == EOS]
        running = sorted((item for item in grown if item[1][-1] != EOS), key=rank, reverse=True)[:width]
    assert all(len(tokens) == num_prompt + max_tokens for _, tokens in running)
    return [tokens for _, tokens in sorted(finished + running, key=rank, reverse=True)[:width]]
