"""Trains the demo model or one of its drafters: `python -m quire.demo.train --help`. It needs transformers.

The bundled weights were made with CPython 3.11 on two cores:
    target   2,600 steps at 2e-3, then --start-from that model with 420 steps at 7e-4 (how-to questions and the fallback
             answer were only in the second run's data), about an hour
    draft    --size draft, 2,000 steps at 3e-3, about ten minutes
    eagle3   --size eagle3, 2,000 steps at 6e-3, about ten minutes
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quire import demo
from quire.demo.data import Entry, chats, clean_entries, questions, render
from quire.demo.train_head import acceptance, train_head

VOCAB_SIZE = 4096
END_OF_TEXT, START_OF_TURN, END_OF_TURN = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAX_POSITIONS = 2048

ROW_TOKENS, ROWS = 256, 16  # of one training step
WARMUP_STEPS = 100
FINAL_RATE = 0.02  # of the peak learning rate, at the end of the cosine
CHECKPOINT_STEPS, REPORT_STEPS = 400, 25

# GPT-4 style pre-tokenization: contractions, words, numbers of up to three digits, punctuation, white space.
WORD_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The models have never seen tools: they answer in text. A history may have calls, which are written as hermes does.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model; head_dim is 64."""

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    intermediate: int


SIZES = {"target": Size(6, 256, 4, 2, 768), "draft": Size(2, 128, 2, 1, 384)}
HEAD = "eagle3"
RUNS = {"target": (2600, 2e-3), "draft": (2000, 3e-3), HEAD: (2000, 6e-3)}  # steps, and the peak learning rate


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("output", type=Path, help="folder for weights, configuration and tokenizer")
    parser.add_argument("--size", choices=[*SIZES, HEAD], default="target")
    parser.add_argument("--steps", type=int, help=f"of {ROWS * ROW_TOKENS} tokens; none: as many as the size needs")
    parser.add_argument("--learning-rate", type=float, help="peak, reached after the warm-up; none: for the size")
    parser.add_argument("--start-from", type=Path, help="model folder to continue from")
    parser.add_argument(
        "--tokenizer", type=Path, help="model folder with the tokenizer: a drafter needs that of its target"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=100, help="asked at the end to measure exact answers")
    args = parser.parse_args()

    num_steps, learning_rate = RUNS[args.size]
    num_steps, learning_rate = args.steps or num_steps, args.learning_rate or learning_rate
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    all_entries = clean_entries()
    source = args.tokenizer or args.start_from or (demo.path("target") if args.size == HEAD else None)
    tokenizer = load_tokenizer(source) if source else train_tokenizer(all_entries, rng)
    if args.size == HEAD:
        target, token_ids = build_model(SIZES["target"], source), batches(tokenizer, all_entries, rng)
        start, assistant, *_, end, _ = tokenizer.encode(f"{START_OF_TURN}assistant\n{END_OF_TURN}\n")
        head = train_head(target, token_ids, (start, assistant, end), rng, num_steps, learning_rate)
        head.save(args.output, target)
        asked = [question for question, _ in questions(all_entries, args.questions)]
        shares = acceptance(head, target, [question_ids(tokenizer, question) for question in asked])
        print("drafts that are right:", ", ".join(f"{share:.3f}" for share in shares))
        return
    model = build_model(SIZES[args.size], args.start_from)
    print(f"{len(all_entries)} entries, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)
    train(model, tokenizer, all_entries, rng, num_steps, learning_rate, args.output)
    exact = count_exact_answers(model, tokenizer, questions(all_entries, args.questions), lambda entry: entry.answer)
    print(f"exact answers: {exact} of {args.questions}")


def train_tokenizer(all_entries: list[Entry], rng: random.Random) -> Any:
    """Byte-level BPE from three passes over the data."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([chat for _ in range(3) for chat in chats(all_entries, rng)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START_OF_TURN],
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def build_model(size: Size, start_from: Path | None) -> Any:
    """A Llama with tied embeddings in float32, random or continued from a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if start_from:
        return LlamaForCausalLM.from_pretrained(start_from, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_q_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        eos_token_id=SPECIAL_TOKENS.index(END_OF_TURN),
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: Any, all_entries: list[Entry], rng: random.Random) -> Iterator[torch.Tensor]:
    """Endless [ROWS, ROW_TOKENS] token ids: shuffled passes end to end, half of the chats closed by END_OF_TEXT."""
    buffered: list[int] = []
    while True:
        shuffled = all_entries[:]
        rng.shuffle(shuffled)
        for chat in chats(shuffled, rng):
            buffered += tokenizer.encode(chat, add_special_tokens=False)
            if rng.random() < 0.5:
                buffered.append(SPECIAL_TOKENS.index(END_OF_TEXT))
        while len(buffered) > ROWS * ROW_TOKENS:
            yield torch.tensor(buffered[: ROWS * ROW_TOKENS]).view(ROWS, ROW_TOKENS)
            del buffered[: ROWS * ROW_TOKENS]


def rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up times a cosine down to FINAL_RATE."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def train(
    model: Any,
    tokenizer: Any,
    all_entries: list[Entry],
    rng: random.Random,
    num_steps: int,
    learning_rate: float,
    output: Path,
) -> None:
    """AdamW on bfloat16 autocast; saves bfloat16 weights every CHECKPOINT_STEPS and at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.perf_counter()
    for step, token_ids in zip(range(num_steps), batches(tokenizer, all_entries, rng), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate_factor(step, num_steps)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=token_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB_SIZE), token_ids[:, 1:].reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % REPORT_STEPS == 0:
            per_step = (time.perf_counter() - started) / (step + 1)
            print(f"step {step}  loss {loss.item():.3f}  {per_step:.2f} s/step", flush=True)
        if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
            save(model, tokenizer, output)
    save(model, tokenizer, output)


def save(model: Any, tokenizer: Any, output: Path) -> None:
    """Weights in bfloat16, configuration and tokenizer; the model in training keeps its float32 weights."""
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()})
    copy.config.dtype = torch.bfloat16
    copy.save_pretrained(output)
    tokenizer.save_pretrained(output)


def question_ids(tokenizer: Any, question: str) -> list[int]:
    """The prompt that asks it."""
    turns = render([("user", question)]) + f"{START_OF_TURN}assistant\n"
    token_ids: list[int] = tokenizer.encode(turns, add_special_tokens=False)
    return token_ids


@torch.inference_mode()
def count_exact_answers(
    model: Any, tokenizer: Any, asked: Iterable[tuple[str, Entry]], expected: Callable[[Entry], str]
) -> int:
    """The number of greedy answers that equal the data word for word."""
    model.eval()
    exact = 0
    for question, entry in asked:
        prompt = question_ids(tokenizer, question)
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=150,
            do_sample=False,
        )
        exact += tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True).strip() == expected(entry)
    return exact


if __name__ == "__main__":
    main()
