"""The acceptance of drafts for several ways to draw them.

It takes a target's own texts, and a draft model's distribution of each next token.

    python benchmarks/draft_acceptance.py [--target FOLDER] [--draft FOLDER]

Prints a table per temperature. Nothing is sampled for it: p and q are the distributions of target and draft model at a
place of a text, and each column is the chance that the target draws the draft there.

    greedy         the draft is the likeliest token of q
    independent    both draw with numbers of their own
    inverse CDF    both draw with one uniform number, in the order of token ids: what the engine does
    Gumbel         both run a race with the same exponential numbers, keyed by token
    most           the acceptance of rejection sampling, the sum of min(p, q)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire import demo
from quire.config import EngineConfig
from quire.cost.model import CostModel
from quire.demo.data import clean_entries, questions, render
from quire.engine.bring_up import bring_up
from quire.engine.core import EngineCore
from quire.entry.launch import find_model, read_tokenizer
from quire.messages import AddRequest
from quire.planning.step_costs import assumed_fit, ceilings, step_arithmetic
from quire.sampling_params import SamplingParams
from quire.scheduler.from_settings import scheduler_of
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import DeviceWorker

TEMPERATURES = (0.0, 0.7, 1.0)
COLUMNS = ("greedy", "independent", "inverse CDF", "Gumbel", "most")
MOST_TOKENS = 150  # the most tokens of an answer
STEP_TOKENS = 512
LEAST_PROBABILITY = 1e-7  # a token that is rarer in both distributions does not take part in a race


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    config: EngineConfig
    runner: ModelRunner
    core: EngineCore


def load(folder: str) -> Model:
    """Load a model as a server would."""
    config = EngineConfig.from_kwargs(model=folder, max_num_seqs=8, max_num_batched_tokens=STEP_TOKENS, device="cpu")
    *_, model_config = find_model(config, None, weights=True)
    worker = DeviceWorker(model_config, lambda phase, share, detail: None)
    running = bring_up(config, model_config, (worker,), is_server=False, progress=lambda phase, share, detail: None)
    arithmetic = step_arithmetic(running.resolved, model_config)
    cost = CostModel(arithmetic, assumed_fit(ceilings(running.resolved, arithmetic, running.facts)))
    scheduler = scheduler_of(running.resolved, model_config, cost)
    return Model(config, worker.runner, EngineCore(scheduler, running.executor))


def texts(target: Model, temperature: float, count: int) -> Iterator[tuple[list[int], int]]:
    """Prompts with answers of the target, each with the number of tokens of its prompt."""
    tokenizer = read_tokenizer(target.config, demo.path("target"))
    asked = [
        render([("user", question)]) + "<|im_start|>assistant\n" for question, _ in questions(clean_entries(), count)
    ]
    for seed, prompt in enumerate(asked):
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=MOST_TOKENS)
        target.core.add(AddRequest("text", token_ids, params, MOST_TOKENS, stop_token_ids=[2]))
        answer: list[int] = []
        while target.core.has_work():
            for delta in target.core.step():
                answer += delta.token_ids
        target.core.scheduler.reset_prefix_cache()
        yield token_ids + answer, len(token_ids)


def distributions(model: Model, token_ids: list[int], num_prompt_tokens: int, temperature: float) -> Tensor:
    """The distribution of the next token at each place of the answer, float64 [places, V]."""
    logits = torch.cat([piece.clone() for piece in model.runner.sequence_logits(token_ids[:-1], STEP_TOKENS)]).double()
    logits = logits[num_prompt_tokens - 1 :]
    if temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).double()
    return (logits / temperature).softmax(1)


def chances(p_V: Tensor, q_V: Tensor) -> list[float]:
    """The chances of acceptance at one place, in the order of COLUMNS."""
    p_ends, q_ends = p_V.cumsum(0), q_V.cumsum(0)
    overlap = torch.minimum(p_ends, q_ends) - torch.maximum(p_ends - p_V, q_ends - q_V)
    race = 0.0
    for token in torch.nonzero(torch.minimum(p_V, q_V) > LEAST_PROBABILITY)[:, 0].tolist():
        race += 1 / float(torch.maximum(p_V / p_V[token], q_V / q_V[token]).sum())
    least = torch.minimum(p_V, q_V).sum()
    return [float(p_V[q_V.argmax()]), float(p_V @ q_V), float(overlap.clamp(min=0).sum()), race, float(least)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(demo.path("target")))
    parser.add_argument("--draft", default=str(demo.path("draft")))
    parser.add_argument("--questions", type=int, default=20)
    args = parser.parse_args()
    target, draft = load(args.target), load(args.draft)
    print(f"| temperature | places | likeliest token | {' | '.join(COLUMNS)} |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for temperature in TEMPERATURES:
        rows, largest = [], []
        for token_ids, num_prompt_tokens in texts(target, temperature, args.questions):
            both = [distributions(model, token_ids, num_prompt_tokens, temperature) for model in (target, draft)]
            largest += both[0].max(1).values.tolist()
            rows += [chances(p_V, q_V) for p_V, q_V in zip(*both, strict=True)]
        means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
        shown = " | ".join(f"{mean:.3f}" for mean in means)
        print(f"| {temperature:g} | {len(rows):,} | {sum(largest) / len(largest):.2f} | {shown} |")


if __name__ == "__main__":
    main()
