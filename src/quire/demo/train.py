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
from typing import Any, get_args

import torch
import torch.nn.functional as F

from quire import demo
from quire.demo.data import Entry, Kind, Turn, chats, clean_entries, questions, render, tool_chats, tool_questions
from quire.demo.train_head import acceptance, train_head

VOCAB_SIZE = 4096
END_OF_TEXT, START_OF_TURN, END_OF_TURN = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAX_POSITIONS = 2048

ROW_TOKENS, ROWS = 256, 16  # the size of one training step
IGNORED = -100  # a target that gives no loss
BLENDED = 0.25  # the share of an older model, if a newer model has forgotten some of its knowledge
TOOL_QUESTIONS = 40  # the number of questions of each kind at the end
WARMUP_STEPS = 100
FINAL_RATE = 0.02  # the last learning rate, as a share of the peak
CHECKPOINT_STEPS, REPORT_STEPS = 50, 10

# GPT-4 style pre-tokenization: contractions, words, numbers of up to three digits, punctuation, white space.
WORD_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Tools are a turn before all others: a line for each, its name and the names of its arguments. Calls are written as
# hermes does. A chat without tools is nothing but its turns. The bundled adapter `tools` was taught this, the bundled
# models were not.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}"
    "{% set arguments = (tool['function']['parameters'] or {})['properties'] %}"
    "{{ '\n' ~ tool['function']['name'] ~ '(' ~ (arguments if arguments is mapping else {}) | join(', ') ~ ')' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
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
class Batch:
    """The data of one step: token ids and targets, [rows, ROW_TOKENS] each.

    Args:
        positions: None: each row is one text; else the same shape, and a new text begins where positions begin anew.
    """

    token_ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None


Row = tuple[list[int], list[int], list[int]]  # token ids, targets and positions


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
    parser.add_argument("--steps", type=int, help="none: as many as the size needs")
    parser.add_argument("--learning-rate", type=float, help="peak, reached after the warm-up; none: for the size")
    parser.add_argument("--start-from", type=Path, help="model folder to continue from")
    parser.add_argument(
        "--blend-with", type=Path, help=f"model folder that makes up {BLENDED} of the weights to begin with"
    )
    parser.add_argument("--tools", action="store_true", help="learn chats with tools; only what the model says")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of one step, of {ROW_TOKENS} tokens each")
    parser.add_argument("--float32", action="store_true", help="faster where the CPU lacks bfloat16's instructions")
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
        target = build_model(SIZES["target"], source)
        token_ids = (batch.token_ids for batch in batches(tokenizer, all_entries, rng, args.rows))
        start, assistant, *_, end, _ = tokenizer.encode(f"{START_OF_TURN}assistant\n{END_OF_TURN}\n")
        head = train_head(target, token_ids, (start, assistant, end), rng, num_steps, learning_rate)
        head.save(args.output, target)
        asked = [question for question, _ in questions(all_entries, args.questions)]
        shares = acceptance(head, target, [prompt_ids(tokenizer, [("user", question)]) for question in asked])
        print("drafts that are right:", ", ".join(f"{share:.3f}" for share in shares))
        return
    model = build_model(SIZES[args.size], args.start_from)
    if args.blend_with:
        older = build_model(SIZES[args.size], args.blend_with)
        for weight, before in zip(model.parameters(), older.parameters(), strict=True):
            weight.data.lerp_(before.data, BLENDED)
    print(f"{len(all_entries)} entries, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)
    make = tool_batches if args.tools else batches
    examples = make(tokenizer, all_entries, rng, args.rows)
    train(model, tokenizer, examples, num_steps, learning_rate, args.output, not args.float32)
    exact = count_exact_answers(model, tokenizer, questions(all_entries, args.questions), lambda entry: entry.answer)
    print(f"exact answers: {exact} of {args.questions}")
    if args.tools:
        print_exact_with_tools(model, tokenizer, all_entries, args.seed)


def train_tokenizer(all_entries: list[Entry], rng: random.Random) -> Any:
    """A tokenizer by byte-level BPE, from three passes over the data."""
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
    """The tokenizer of a folder, with the template of this file."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


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


def batches(tokenizer: Any, all_entries: list[Entry], rng: random.Random, num_rows: int) -> Iterator[Batch]:
    """Batches without end: shuffled passes one after the other. END_OF_TEXT closes half of the chats.

    Every token is a target.
    """
    buffered: list[int] = []
    size = num_rows * ROW_TOKENS
    while True:
        shuffled = all_entries[:]
        rng.shuffle(shuffled)
        for chat in chats(shuffled, rng):
            buffered += tokenizer.encode(chat, add_special_tokens=False)
            if rng.random() < 0.5:
                buffered.append(SPECIAL_TOKENS.index(END_OF_TEXT))
        while len(buffered) > size:
            token_ids = torch.tensor(buffered[:size]).view(num_rows, ROW_TOKENS)
            yield Batch(token_ids, token_ids)
            del buffered[:size]


def tool_batches(tokenizer: Any, all_entries: list[Entry], rng: random.Random, num_rows: int) -> Iterator[Batch]:
    """Batches without end: whole chats, with and without tools, side by side in a row.

    Only the model's answers are targets.
    """
    empty = (SPECIAL_TOKENS.index(END_OF_TEXT), IGNORED, 0)
    rows: list[Row] = [([], [], []) for _ in range(num_rows)]
    for chat in tool_chats(all_entries, rng):
        token_ids, targets = learned(tokenizer, chat)
        if len(token_ids) > ROW_TOKENS:
            continue
        row = next((row for row in rows if len(row[0]) + len(token_ids) <= ROW_TOKENS), None)
        if row is None:
            yield Batch(
                *(
                    torch.tensor([column + [fill] * (ROW_TOKENS - len(column)) for column in columns])
                    for columns, fill in zip(zip(*rows, strict=True), empty, strict=True)
                )
            )
            rows = [([], [], []) for _ in range(num_rows)]
            row = rows[0]
        for column, more in zip(row, (token_ids, targets, range(len(token_ids))), strict=True):
            column += more


def learned(tokenizer: Any, chat: list[Turn]) -> tuple[list[int], list[int]]:
    """The token ids of a chat, and the targets: the assistant's tokens."""
    token_ids: list[int] = []
    targets: list[int] = []
    for role, content in chat:
        prompt = tokenizer.encode(f"{START_OF_TURN}{role}\n", add_special_tokens=False)
        said = tokenizer.encode(f"{content}{END_OF_TURN}\n", add_special_tokens=False)
        token_ids += prompt + said
        targets += [IGNORED] * len(prompt) + (said if role == "assistant" else [IGNORED] * len(said))
    return token_ids, targets


def rate_factor(step: int, num_steps: int) -> float:
    """The learning rate of a step as a share of the peak: a linear warm-up times a cosine down to FINAL_RATE."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def train(
    model: Any,
    tokenizer: Any,
    examples: Iterator[Batch],
    num_steps: int,
    learning_rate: float,
    output: Path,
    autocast: bool,
) -> None:
    """Train with AdamW. Weights are saved in bfloat16 every CHECKPOINT_STEPS steps and at the end.

    Args:
        learning_rate: the peak.
        autocast: whether products are computed in bfloat16.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.perf_counter()
    for step, batch in zip(range(num_steps), examples, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate_factor(step, num_steps)
        loss = loss_of(model, batch, autocast)
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


def loss_of(model: Any, batch: Batch, autocast: bool) -> torch.Tensor:
    """The mean loss of the targets of a batch, in bfloat16 or in float32."""
    targets = batch.targets[:, 1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.model(batch.token_ids, position_ids=batch.positions, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][targets != IGNORED])
    return F.cross_entropy(logits.float(), targets[targets != IGNORED])


def save(model: Any, tokenizer: Any, output: Path) -> None:
    """Save the weights in bfloat16, the configuration and the tokenizer. The model itself stays in float32."""
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()})
    copy.config.dtype = torch.bfloat16
    copy.save_pretrained(output)
    tokenizer.save_pretrained(output)


def prompt_ids(tokenizer: Any, turns: list[Turn]) -> list[int]:
    """The prompt that asks for the next answer."""
    text = render(turns) + f"{START_OF_TURN}assistant\n"
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def count_exact_answers(
    model: Any, tokenizer: Any, asked: Iterable[tuple[str, Entry]], expected: Callable[[Entry], str]
) -> int:
    """The number of greedy answers that equal the data word for word."""
    return sum(answer_to(model, tokenizer, [("user", question)]) == expected(entry) for question, entry in asked)


def print_exact_with_tools(model: Any, tokenizer: Any, all_entries: list[Entry], seed: int) -> None:
    """Print for each kind how many questions, drawn with the seed, the model answers word for word."""
    for kind in get_args(Kind):
        fresh = tool_questions(all_entries, kind, TOOL_QUESTIONS, seed)
        exact = sum(answer_to(model, tokenizer, turns) == answer for turns, answer in fresh)
        print(f"exact with tools, {kind}: {exact} of {TOOL_QUESTIONS}")


@torch.inference_mode()
def answer_to(model: Any, tokenizer: Any, turns: list[Turn]) -> str:
    """The greedy answer to the turns."""
    model.eval()
    prompt = prompt_ids(tokenizer, turns)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=150,
        do_sample=False,
    )
    answer: str = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
    return answer.strip()


if __name__ == "__main__":
    main()
