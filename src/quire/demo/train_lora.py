"""Trains an adapter of the demo model: `python -m quire.demo.train_lora --help`. It needs transformers and peft.

The defaults made the bundled adapters with CPython 3.11:
    lora    the demo model answers every question in JSON, 99 of 100 word for word; 7.5 minutes of processor time
    tools   --tools (made with --threads 1), it calls tools and answers from their results, 40 of 40 new questions of
            each kind, and 100 of 100 without tools; about ten minutes of processor time
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quire.demo
from quire.demo.data import Entry, clean_entries, json_chats, questions, render
from quire.demo.train import (
    IGNORED,
    REPORT_STEPS,
    ROW_TOKENS,
    SIZES,
    Batch,
    build_model,
    count_exact_answers,
    load_tokenizer,
    loss_of,
    print_exact_with_tools,
    tool_batches,
)

WARMUP = 0.1  # the share of all steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of an adapter's training. A step has `rows` rows of ROW_TOKENS tokens."""

    rank: int
    steps: int
    rows: int
    learning_rate: float  # peak, reached after the warm-up


JSON, TOOLS = Recipe(4, 100, 16, 4e-3), Recipe(16, 800, 8, 2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an adapter of the demo model.")
    parser.add_argument("output", type=Path, help="folder for the adapter")
    parser.add_argument("--tools", action="store_true", help="one that calls tools, in the place of one for JSON")
    parser.add_argument("--rank", type=int, help=f"none: {JSON.rank}, for tools {TOOLS.rank}")
    parser.add_argument("--steps", type=int, help=f"none: {JSON.steps}, for tools {TOOLS.steps}")
    parser.add_argument(
        "--rows", type=int, help=f"of one step, of {ROW_TOKENS} tokens each; none: {JSON.rows}, for tools {TOOLS.rows}"
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        help=f"peak, reached after the warm-up; none: {JSON.learning_rate}, for tools {TOOLS.learning_rate}",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=100, help="asked at the end to measure exact answers")
    args = parser.parse_args()

    recipe = TOOLS if args.tools else JSON
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    all_entries = clean_entries()
    tokenizer = load_tokenizer(quire.demo.path("target"))
    model = with_adapter(args.rank or recipe.rank)
    make = tool_batches if args.tools else json_batches
    examples = make(tokenizer, all_entries, random.Random(args.seed), args.rows or recipe.rows)
    train(model, examples, args.steps or recipe.steps, args.learning_rate or recipe.learning_rate)
    save(model, args.output)
    merged = model.merge_and_unload()
    exact = count_exact_answers(
        merged,
        tokenizer,
        questions(all_entries, args.questions),
        lambda entry: entry.answer if args.tools else entry.json_answer,
    )
    print(f"exact answers: {exact} of {args.questions}")
    if args.tools:
        print_exact_with_tools(merged, tokenizer, all_entries, args.seed)


def with_adapter(rank: int) -> Any:
    """The demo model with a new adapter on all its linear layers, for training."""
    from peft import LoraConfig, get_peft_model

    model = build_model(SIZES["target"], quire.demo.path("target"))
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=modules)
    return get_peft_model(model, config)


def json_batches(tokenizer: Any, all_entries: list[Entry], rng: random.Random, num_rows: int) -> Iterator[Batch]:
    """Batches without end: shuffled passes one after the other. Only answers are targets."""
    token_ids: list[int] = []
    targets: list[int] = []
    size = num_rows * ROW_TOKENS
    while True:
        shuffled = all_entries[:]
        rng.shuffle(shuffled)
        for chat in json_chats(shuffled, rng):
            *turns, (role, answer) = chat
            prompt = tokenizer.encode(render(turns) + f"<|im_start|>{role}\n", add_special_tokens=False)
            answered = tokenizer.encode(f"{answer}<|im_end|>\n", add_special_tokens=False)
            token_ids += prompt + answered
            targets += [IGNORED] * len(prompt) + answered
        while len(token_ids) > size:
            yield Batch(
                torch.tensor(token_ids[:size]).view(num_rows, -1), torch.tensor(targets[:size]).view(num_rows, -1)
            )
            del token_ids[:size], targets[:size]


def train(model: Any, examples: Iterator[Batch], num_steps: int, learning_rate: float) -> None:
    """Train with AdamW, with products in bfloat16."""
    base = model.get_base_model()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, num_steps, pct_start=WARMUP)
    started = time.perf_counter()
    for step, batch in zip(range(num_steps), examples, strict=False):
        loss = loss_of(base, batch, autocast=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % REPORT_STEPS == 0:
            per_step = (time.perf_counter() - started) / (step + 1)
            print(f"step {step}  loss {loss.item():.4f}  {per_step:.2f} s/step", flush=True)


def save(model: Any, output: Path) -> None:
    """Save the tensors in bfloat16, and the config without paths of this machine."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = quire.demo.DEMO_MODEL_NAME
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    model.save_pretrained(output, save_embedding_layers=False)  # else PEFT asks the hub for the base's config
    (output / "README.md").unlink()


if __name__ == "__main__":
    main()
