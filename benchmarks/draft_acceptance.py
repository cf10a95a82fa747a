"""The acceptance of drafts: of a draft model for several ways to draw them, or of an EAGLE-3 head.

    python benchmarks/draft_acceptance.py [--target FOLDER] [--draft FOLDER | --head FOLDER] [--questions 20]
                                          [--what flat] [--save HARDWARE]

The texts are the target's own answers, at each temperature. With --draft (default: the bundled draft model) nothing is
sampled: p and q are the distributions of target and draft model at a place of a text, and each column is the chance
that the target draws the draft there.

    greedy         the draft is the likeliest token of q
    independent    both draw with numbers of their own
    inverse CDF    both draw with one uniform number, in the order of token ids: what the engine does
    Gumbel         both run a race with the same exponential numbers, keyed by token
    most           the acceptance of rejection sampling, the sum of min(p, q)

With --head (`bundled`: the demo model's), the engine answers with two drafts of the head in every step, drawn as it
draws them. The columns are the shares of drafts that held, of those whose predecessors held. --save writes
benchmarks/results/HARDWARE/draft_acceptance_DATE.md and .json, or head_acceptance_DATE; with --what its word stands
before the date.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire import LLM, demo
from quire.config import EngineConfig
from quire.cost.model import CostModel
from quire.demo.data import clean_entries, questions, render
from quire.engine.bring_up import bring_up
from quire.engine.core import EngineCore
from quire.entry.launch import find_model, read_tokenizer
from quire.measure import report
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
HEAD_DRAFTS = 2  # of a head in a step
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


def prompts(count: int) -> list[str]:
    """Questions to the demo model."""
    return [
        render([("user", question)]) + "<|im_start|>assistant\n" for question, _ in questions(clean_entries(), count)
    ]


def texts(target: Model, temperature: float, count: int) -> Iterator[tuple[list[int], int]]:
    """Prompts with answers of the target, each with the number of tokens of its prompt."""
    tokenizer = read_tokenizer(target.config, demo.path("target"))
    for seed, prompt in enumerate(prompts(count)):
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


def of_draft_model(target_folder: str, draft_folder: str, num_questions: int) -> list[dict[str, Any]]:
    """The rows of the table of a draft model."""
    target, draft, found = load(target_folder), load(draft_folder), list[dict[str, Any]]()
    for temperature in TEMPERATURES:
        rows, largest = [], []
        for token_ids, num_prompt_tokens in texts(target, temperature, num_questions):
            both = [distributions(model, token_ids, num_prompt_tokens, temperature) for model in (target, draft)]
            largest += both[0].max(1).values.tolist()
            rows += [chances(p_V, q_V) for p_V, q_V in zip(*both, strict=True)]
        means = dict(zip(COLUMNS, torch.tensor(rows, dtype=torch.float64).mean(0).tolist(), strict=True))
        likeliest = sum(largest) / len(largest)
        found.append({"temperature": temperature, "places": len(rows), "likeliest token": likeliest, **means})
    return found


def of_head(target_folder: str, head_folder: str, num_questions: int) -> list[dict[str, Any]]:
    """The rows of the table of a head."""
    drafting = {
        "method": "eagle3",
        "model": head_folder,
        "num_speculative_tokens": HEAD_DRAFTS,
        "adaptive": False,
    }
    llm = LLM(target_folder, speculative_config=drafting, per_request_spec_decode_metrics="detailed", device="cpu")
    found = list[dict[str, Any]]()
    for temperature in TEMPERATURES:
        asked = prompts(num_questions)
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=MOST_TOKENS) for seed in range(len(asked))
        ]
        tried, held = [0] * HEAD_DRAFTS, [0] * HEAD_DRAFTS
        for answer in llm.generate(asked, params, use_tqdm=False):
            metrics = answer.outputs[0].spec_decode_metrics
            assert metrics is not None
            for num_drafted, num_held in zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True):
                for position in range(min(num_drafted, num_held + 1)):
                    tried[position] += 1
                    held[position] += position < num_held
        shares = {f"draft {at + 1}": held[at] / tried[at] for at in range(HEAD_DRAFTS)}
        found.append({"temperature": temperature, "first drafts": tried[0], **shares})
    return found


def shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def markdown(result: dict[str, Any]) -> str:
    rows = result["rows"]
    lines = [
        *report.heading(f"Acceptance of drafts of {result['drafter']}", result),
        f"- Answers to {result['questions']} questions, at most {MOST_TOKENS} tokens each.",
        "",
        *report.table_head(" | ".join(rows[0])),
    ]
    for row in rows:
        temperature, *others = row.values()
        lines.append(f"| {temperature:g} | {' | '.join(map(shown, others))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--target", default=str(demo.path("target")))
    drafter = parser.add_mutually_exclusive_group()
    drafter.add_argument("--draft", default=str(demo.path("draft")))
    drafter.add_argument("--head", metavar="FOLDER", help="an EAGLE-3 head, or `bundled`")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--what", help="a word for the name of the file")
    arguments = parser.parse_args()
    if arguments.head is None:
        what, rows = "a draft model", of_draft_model(arguments.target, arguments.draft, arguments.questions)
    else:
        head = str(demo.path("eagle3")) if arguments.head == "bundled" else arguments.head
        what, rows = "an EAGLE-3 head", of_head(arguments.target, head, arguments.questions)
    result = {
        **report.environment("python", "benchmarks/draft_acceptance.py"),
        "drafter": what,
        "questions": arguments.questions,
        "rows": rows,
    }
    name = "draft_acceptance" if arguments.head is None else "head_acceptance"
    report.publish(__file__, arguments.save, "_".join(filter(None, (name, arguments.what))), result, markdown(result))


if __name__ == "__main__":
    main()
