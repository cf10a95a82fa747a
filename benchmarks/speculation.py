"""The gain of speculation over the same engine without it, and the share of the possible gain that is reached.

The first run writes two models of 0.6 billion parameters each into FOLDER (benchmarks/inflated.py). `chat` is the demo
model, with a draft model that is trained for a short time, and with the bundled EAGLE-3 head. `copy-edit` repeats its
prompt with few edits. In every round the engines with and without speculation answer the same prompts in turns. They
must give the same tokens.

    python benchmarks/speculation.py FOLDER [--workloads chat copy-edit] [--formats none int4] [--requests 1 8]
                                     [--methods ngram suffix draft_model eagle3] [--drafts 7] [--fixed 2 4] [--switched]
                                     [--rates 0] [--prompt-tokens 1900] [--tokens 96] [--temperature 0] [--rounds 5]
                                     [--draft-steps 600] [--again]
                                     [--peer NAME OFF ON] [--save HARDWARE [--name NAME]]
    python benchmarks/speculation.py FOLDER --shape MODEL [--methods draft_model mtp] [--rates 0.2 0.5 0.8]
                                     [--prompt-tokens 32] ...

--shape measures a checkpoint with any weights instead of these two models, with random prompts. The checkpoint's first
layers are its draft model. For mtp, it becomes a MiMo with a layer for multi-token prediction. With --rates, drafts are
accepted at random, with these shares: the tokens are wrong, but the times are right. With --rates 0 no draft is
accepted, and no token is wrong: then the gain shows the cost of useless drafts. --prompt-tokens puts earlier turns
before the question of `chat`.

A draft model that is trained for 600 steps (2.5 minutes on two cores of a Zen 4) has an acceptance of 0.7. With 200
steps the acceptance is 0.3; nearly all drafts of the bundled draft model (2,000 steps) are accepted.

--fixed adds an engine whose number of drafts does not adapt, with each of these numbers in turn. --switched compares an
engine that adapts also with itself, without drafts (SetLimits): two engines differ by where their memory lies, which is
several percent of a long prompt. --again shows by how much: it adds a second engine without speculation. --peer adds
another engine by two commands, without and with speculation. The commands speak the protocol of
benchmarks/peers/speculating.py and may contain {folder}, {workload} and {format}. --save writes
benchmarks/results/HARDWARE/NAME_DATE.md and .json.

The possible gain is E / (c (k + 1) + k d), with E = (1 - a^(k + 1)) / (1 - a). k is the number of drafts of each
request. a is the probability that a draft is accepted if all drafts before it were accepted. c is the cost of a step
that verifies drafts, and d the cost of a step of the draft model, both divided by the cost of a step of one token. All
of them are measured in the run that measures the gain. Drafts from text cost nothing in this formula. For a head, d is
its time in the steps with drafts over their drafts, so it contains what the head reads there. The formula
assumes that the number of requests does not change. Therefore its share that is reached is computed from the time in
which all requests run: with drafts the requests end one after the other, and the last requests have the steps for
themselves.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from inflated import DRAFT, HEAD, TARGET, Shape, copy_edit, edited_text, first_layers, inflate, inflate_head, with_mtp
from peers.process import Peer
from tokenizers import Tokenizer
from verify_rows import median_step, verify_step

import quire.demo
from quire.config import EngineConfig
from quire.demo.data import clean_entries, questions, render
from quire.engine.start import start_engine
from quire.measure import report
from quire.measure.statistics import mean_interval
from quire.messages import AddRequest, SetLimits
from quire.model_config import load_model_config
from quire.sampling_params import SamplingParams
from quire.schedule import MAX_RECORDED_TOKENS, Pending, ScheduledBatch, StepResult
from quire.speculative_config import SpeculativeConfig

# For --small, which tries the script.
SMALL = (Shape(1024, 7, 1024, 3), Shape(512, 3, 512, 2), Shape(1024, 1, 1024, 3))
NEED_CHAT = ("draft_model", "eagle3")  # methods whose drafters know the texts of `chat`
TEXT_TOKENS, EDITS = 160, 1 / 32  # the length of a prompt of copy-edit, and the share of its tokens that are edited
SHAPE_LAYERS = 2  # layers of the draft model of --shape
SHAPE_RATES, SHAPE_PROMPT = (0.2, 0.5, 0.8), 32  # the defaults of --shape
HEADS = ("eagle3", "mtp")
CONTEXT = 1024  # tokens of a request, at least
WANTED_GAIN = {"none": 3.0, "int4": 2.5}  # for copy-edit with one request
WANTED_SHARE = 0.9
VERIFY_STEPS = 3  # in a round, of each number of tokens, one way and back
# Before each measured answer, the engine answers another prompt, because the weights of another engine were read last.
WARM_TOKENS, WARM_ROUND = 3, 10**6
LOGIT_ROWS = 64  # the rows of logits of a step; drafts use the rows that no request needs
OFF, AGAIN, ALWAYS, SWITCHED = "off", "off, again", ", always ", ", switched off"
Prompts = list[list[int]]
Steps = list[list[tuple[int, int]]]  # for each row of each step: the number of its drafts, and how many were accepted


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a run: the tokens, and for Quire the drafts of each step and how many were accepted."""

    seconds: float  # for everything
    decode_seconds: float  # since every request has its first token
    decode_tokens: int  # in that time
    token_ids: Prompts
    steps: Steps  # the steps of that time
    num_full: int  # the number of these steps up to the first end of a request
    full_seconds: float  # the time of these num_full steps
    full_tokens: int
    drafter_seconds: float = 0.0  # of a drafter in the worker, in all steps


class Noted:
    """A submitted step. Its result only fills a row of counts: the result itself is not kept, because it has logits.

    Args:
        counts: it gets, for each row of the step, the number of drafts and how many of them were accepted.
        drafter_seconds: it gets the time of a drafter in the worker.
    """

    def __init__(
        self,
        batch: ScheduledBatch,
        pending: Pending[StepResult],
        counts: list[tuple[int, int]],
        drafter_seconds: list[float],
    ) -> None:
        self._drafts, self._pending = [*map(len, batch.draft_token_ids)], pending
        self._counts, self._drafter_seconds = counts, drafter_seconds

    def result(self) -> StepResult:
        result = self._pending.result()
        held = [max(len(token_ids) - 1, 0) for token_ids in result.token_ids]
        self._counts[:] = zip(self._drafts, held, strict=True)
        self._drafter_seconds.append(result.draft_seconds)
        return result


class Engine:
    """Quire with one method of speculation, or without speculation."""

    def __init__(
        self, model: Path, quantization: str | None, most: int, context: int, speculation: SpeculativeConfig | None
    ) -> None:
        config = EngineConfig(
            model=str(model),
            quantization=quantization,
            max_model_len=context,
            max_num_seqs=max(most, LOGIT_ROWS),
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            speculative_config=speculation,
        )
        draft = None if speculation is None or speculation.model is None else Path(speculation.model)
        started = start_engine(config, model, is_server=False, progress=lambda *report: None, drafter_folder=draft)
        self.core = started.core
        self._submit = self.core.executor.submit
        self.core.executor.submit = self.submit  # type: ignore[method-assign]
        self._steps: Steps = []
        self._drafter_seconds: list[float] = []
        while started.calibrate():  # as a server does while no request waits
            pass
        for num_tokens in range(1, 1 + MAX_RECORDED_TOKENS):
            verify_step(self.core, 1, num_tokens, TEXT_TOKENS)

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self._steps.append([])
        return Noted(batch, self._submit(batch), self._steps[-1], self._drafter_seconds)

    def run(self, prompts: Prompts, num_tokens: int, temperature: float, depth: int | None = None) -> Answer:
        """Answer all prompts at once with `num_tokens` tokens each. `depth` is the most drafts of a request from now
        on.
        """
        if depth is not None:
            self.core.set_limits(SetLimits(spec_tokens=depth))
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=num_tokens, ignore_eos=True)
        found: dict[str, list[int]] = {f"r{index}": [] for index in range(len(prompts))}
        self._steps.clear()
        self._drafter_seconds.clear()
        started = decoding = time.perf_counter()
        before = first_step = num_full = full_tokens = 0
        full_seconds = 0.0
        for name, prompt in zip(found, prompts, strict=True):
            self.core.add(AddRequest(name, prompt, params, max_tokens=num_tokens))
        while self.core.has_work():
            for delta in self.core.step():
                assert delta.error is None, delta.error
                found[delta.request_id] += delta.token_ids
            if not first_step and all(found.values()):
                decoding, first_step = time.perf_counter(), len(self._steps)
                before = sum(map(len, found.values()))
            if not num_full and any(len(token_ids) == num_tokens for token_ids in found.values()):
                num_full, full_seconds = len(self._steps) - first_step, time.perf_counter() - decoding
                full_tokens = sum(map(len, found.values())) - before
        ended = time.perf_counter()
        num_decoded = sum(map(len, found.values())) - before
        steps = self._steps[first_step:]
        full = num_full, full_seconds, full_tokens
        drafting = sum(self._drafter_seconds[first_step:])
        return Answer(ended - started, ended - decoding, num_decoded, list(found.values()), steps, *full, drafting)


def write_models(folder: Path, draft_steps: int, is_small: bool) -> None:
    """Write the missing models: chat, its draft model (trained here and then inflated), its head, and copy-edit."""
    target, draft, head = SMALL if is_small else (TARGET, DRAFT, HEAD)
    if not (folder / "chat").exists():
        inflate(quire.demo.path("target"), folder / "chat", target)
    if not (folder / "copy-edit").exists():
        copy_edit(folder / "copy-edit", target, quire.demo.path("target"))
    if not (folder / "head").exists():
        inflate_head(quire.demo.path("eagle3"), folder / "head", head)
    if not draft_folder(folder, draft_steps).exists():
        trained = folder / f"draft of {draft_steps} steps" if draft_steps else quire.demo.path("draft")
        if not trained.exists():
            options = ["--size", "draft", "--tokenizer", str(quire.demo.path("target"))]
            options += ["--learning-rate", "3e-3", "--questions", "0"]
            command = [sys.executable, "-m", "quire.demo.train", str(trained), "--steps", str(draft_steps), *options]
            subprocess.run(command, check=True)
        inflate(trained, draft_folder(folder, draft_steps), draft)


def draft_folder(folder: Path, draft_steps: int) -> Path:
    return folder / f"draft-{draft_steps}"


def prompts_of(workload: str, vocab_size: int, num_tokens: int) -> Callable[[int, int], Prompts]:
    """The prompts of a round, by its number and how many are wanted.

    Args:
        num_tokens: of a random prompt, and at least of a chat.
    """
    if workload == "shape":

        def any_tokens(number: int, count: int) -> Prompts:
            draw = random.Random(1000 * number + count)
            return [draw.choices(range(10, vocab_size // 2), k=num_tokens) for _ in range(count)]

        return any_tokens
    if workload == "copy-edit":

        def texts(number: int, count: int) -> Prompts:
            draw = random.Random(1000 * number + count)
            return [edited_text(vocab_size, TEXT_TOKENS, EDITS, draw)[0] for _ in range(count)]

        return texts
    tokenizer = Tokenizer.from_file(str(quire.demo.path("target") / "tokenizer.json"))
    asked = questions(clean_entries(), 500)

    def chat(question: str, draw: random.Random) -> list[int]:
        token_ids = tokenizer.encode(render([("user", question)]) + "<|im_start|>assistant\n").ids
        length = max(num_tokens, len(token_ids))
        while len(token_ids) < length:
            before, entry = draw.choice(asked)
            earlier = render([("user", before), ("assistant", entry.answer)])
            token_ids = [*tokenizer.encode(earlier).ids, *token_ids]
        return token_ids[-length:]

    def chats(number: int, count: int) -> Prompts:
        draw = random.Random(1000 * number + count)
        return [chat(question, draw) for question, _ in draw.sample(asked, count)]

    return chats


def acceptance(steps: Sequence[Sequence[tuple[int, int]]]) -> float:
    """The share of accepted drafts among the drafts whose predecessors were accepted; nan if there were no drafts."""
    rows = [row for step in steps for row in step]
    num_held = sum(held for _, held in rows)
    num_failed = sum(held < drafts for drafts, held in rows)
    return num_held / (num_held + num_failed) if num_held + num_failed else float("nan")


def possible_gain(
    steps: Sequence[Sequence[tuple[int, int]]], share: float, costs: Sequence[float], draft_cost: float
) -> float:
    """The possible gain of steps with these drafts: the tokens of each request divided by the relative cost of the
    steps.

    Args:
        share: the acceptance.
        costs: the costs of steps with 1, 2, ... tokens of each request, divided by that of a step of one token.
        draft_cost: the cost of one draft for each request, divided likewise.
    """
    tokens = cost = 0.0
    for step in steps:
        counts = [drafts for drafts, _ in step]
        mean = statistics.mean(counts)
        tokens += statistics.mean(sum(share**index for index in range(count + 1)) for count in counts)
        cost += float(np.interp(1 + mean, range(1, 1 + len(costs)), costs)) + mean * draft_cost
    return tokens / cost if cost else float("nan")


def speculations(arguments: argparse.Namespace, workload: str, models: dict[str, str]) -> dict[str, SpeculativeConfig]:
    """The kinds of speculation that are compared with no speculation, by the names that are shown.

    Args:
        models: the drafters of methods that need one.
    """
    most, found = arguments.drafts, dict[str, SpeculativeConfig]()
    for method in arguments.methods:
        if workload == "copy-edit" and method in NEED_CHAT:
            continue
        for rate in arguments.rates or [None]:
            synthetic: dict[str, Any] = {}
            if rate is not None:
                rates = tuple(rate**count for count in range(1, most + 1))
                synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            for adaptive in (True, False) if arguments.fixed else (True,):
                name = method if rate is None else f"{method}, {rate:g} hold"
                found[name if adaptive else f"{name}{ALWAYS}"] = SpeculativeConfig(
                    method=method,
                    num_speculative_tokens=most,
                    model=models.get(method),
                    adaptive=adaptive,
                    **synthetic,
                )
    return found


def shape_target(arguments: argparse.Namespace) -> Path:
    """The folder of the model of --shape that is measured."""
    is_mimo = "mtp" in arguments.methods
    return Path(arguments.folder / f"{arguments.shape.name} as a MiMo" if is_mimo else arguments.shape)


def is_exact(arguments: argparse.Namespace) -> bool:
    """Whether the tokens are those that the model gives without drafts."""
    return not any(arguments.rates)


class Case:
    """One workload in one format: its engines and their results."""

    def __init__(self, arguments: argparse.Namespace, workload: str, form: str) -> None:
        self._arguments, self._is_exact = arguments, is_exact(arguments)
        folder, most = arguments.folder, max(arguments.requests)
        quantization = None if form == "none" else form
        target = shape_target(arguments) if arguments.shape else folder / workload
        draft = folder / "first layers" if arguments.shape else draft_folder(folder, arguments.draft_steps)
        models = {"draft_model": str(draft), "eagle3": str(folder / "head"), "mtp": str(target)}
        context = max(CONTEXT, arguments.prompt_tokens + 2 * arguments.tokens)
        found = speculations(arguments, workload, models)
        self.engines: dict[str, Engine | Peer] = {OFF: Engine(target, quantization, most, context, None)}
        self._depths: dict[str, int] = {}  # for engines that do not adapt: one engine is measured with all depths
        for name, speculation in found.items():
            engine = Engine(target, quantization, most, context, speculation)
            depths = arguments.fixed if name.endswith(ALWAYS) else []
            self._depths |= {f"{name}{depth}": depth for depth in depths}
            self.engines |= {f"{name}{depth}": engine for depth in depths} or {name: engine}
            if arguments.switched and not name.endswith(ALWAYS):
                self.engines[name + SWITCHED] = engine
                self._depths |= {name: arguments.drafts, name + SWITCHED: 0}
        if arguments.again:
            self.engines[AGAIN] = Engine(target, quantization, most, context, None)
        has_draft = any(speculation.method == "draft_model" for speculation in found.values())
        self._draft = Engine(draft, quantization, most, context, None) if has_draft else None
        for name, *commands in arguments.peer:
            for state, command in zip(("off", "on"), commands, strict=True):
                filled = command.format(folder=folder, workload=workload, format=form)
                self.engines[f"{name} {state}"] = Peer(filled)
        self._full_steps: dict[tuple[int, int, str], Steps] = {}  # while all requests run; by round, requests, engine
        self._prompts = prompts_of(workload, load_model_config(target).vocab_size, arguments.prompt_tokens)

    def round(self, number: int, requests: int) -> dict[str, Any]:
        """Run every engine once on the same prompts, measure the times of steps, and compute the gains."""
        arguments = self._arguments
        prompts = self._prompts(number, requests)
        names = list(self.engines) if number % 2 else list(reversed(self.engines))
        answers = {name: self._run(name, prompts) for name in names}
        context = len(prompts[0]) + arguments.tokens // 2
        found: dict[str, Any] = self._step_times(requests, context) | {"engines": {}}
        expected = answers[OFF]
        for name, answer in answers.items():
            tokens = requests * arguments.tokens
            one: dict[str, float] = {
                "tokens_per_second": tokens / answer.seconds,
                "decode_tokens_per_second": answer.decode_tokens / answer.decode_seconds,
            }
            if isinstance(self.engines[name], Engine):
                assert not self._is_exact or answer.token_ids == expected.token_ids, f"{name} gives other tokens"
                gain = (answer.decode_tokens / answer.decode_seconds) / (
                    expected.decode_tokens / expected.decode_seconds
                )
                full_gain = (answer.full_tokens / answer.full_seconds) / (expected.full_tokens / expected.full_seconds)
                one |= {
                    "gain": gain,
                    "full_gain": full_gain,
                    "first_seconds": answer.seconds - answer.decode_seconds,
                    "first_token": (answer.seconds - answer.decode_seconds)
                    / (expected.seconds - expected.decode_seconds),
                    "acceptance": acceptance(answer.steps),
                    "drafts": statistics.mean(drafts for step in answer.steps for drafts, _ in step),
                }
                if name.startswith(HEADS):
                    num_drafts = sum(statistics.mean(drafts for drafts, _ in step) for step in answer.steps)
                    one["draft_ms"] = 1e3 * answer.drafter_seconds / num_drafts if num_drafts else float("nan")
                self._full_steps[number, requests, name] = answer.steps[: answer.num_full]
            found["engines"][name] = one
        return found

    def _step_times(self, requests: int, context: int) -> dict[str, Any]:
        """Milliseconds of some steps with 1, 2, ... tokens of each request, and of steps of the draft model with one
        token.
        """
        off, counts = self.engines[OFF], range(1, 2 + self._arguments.drafts)
        assert isinstance(off, Engine)
        steps: list[list[float]] = [[] for _ in counts]
        drafts: list[float] = []
        for turn in range(2):
            for count in reversed(counts) if turn else counts:
                steps[count - 1].append(median_step(off.core, requests, count, context, VERIFY_STEPS)["step"])
            if self._draft is not None:
                drafts.append(median_step(self._draft.core, requests, 1, context, VERIFY_STEPS)["step"])
        return {"steps_ms": steps, "draft_ms": drafts}

    def add_possible_gains(self, requests: int, rounds: list[dict[str, Any]]) -> None:
        """Add the possible gain to each of the rounds 1, 2, ...; it is computed from the costs of all rounds."""
        counts = range(1 + self._arguments.drafts)
        steps = [statistics.median(step for one in rounds for step in one["steps_ms"][count]) for count in counts]
        drafts = [step for one in rounds for step in one["draft_ms"]]
        costs, draft_cost = [step / steps[0] for step in steps], statistics.median(drafts) / steps[0] if drafts else 0.0
        for number, found in enumerate(rounds, start=1):
            found |= {"costs": costs, "draft_cost": draft_cost}
            for name, one in found["engines"].items():
                if "gain" not in one:
                    continue
                cost, done = draft_cost_of(rounds, name), self._full_steps[number, requests, name]
                share = acceptance(done)
                one["possible"] = 1.0 if share != share else possible_gain(done, share, costs, cost)

    def _run(self, name: str, prompts: Prompts) -> Answer:
        """Answer the prompts with one engine. A peer decodes greedily at any temperature."""
        engine, num_tokens, depth = self.engines[name], self._arguments.tokens, self._depths.get(name)
        warm = self._prompts(WARM_ROUND, 1)
        if isinstance(engine, Engine):
            engine.run(warm, WARM_TOKENS, 0.0, depth)
            return engine.run(prompts, num_tokens, self._arguments.temperature, depth)
        engine.ask({"prompts": warm, "num_tokens": WARM_TOKENS}, "seconds")
        first, seconds = (engine.ask({"prompts": prompts, "num_tokens": count}, "seconds") for count in (1, num_tokens))
        return Answer(seconds, seconds - first, len(prompts) * (num_tokens - 1), [], [], 0, 0.0, 0)

    def close(self) -> None:
        for engine in {id(engine): engine for engine in self.engines.values()}.values():
            if isinstance(engine, Peer):
                engine.close()
            else:
                engine.core.shutdown()
        self.engines.clear()
        gc.collect()  # to free the memory for the weights of the next case


def draft_cost_of(rounds: list[dict[str, Any]], name: str) -> float:
    """The cost of a draft for each request, divided by that of a step of one token."""
    if name.startswith("draft_model"):
        return float(rounds[0]["draft_cost"])
    if not name.startswith(HEADS):
        return 0.0
    cost = middle(rounds, name, "draft_ms") / statistics.median(ms for one in rounds for ms in one["steps_ms"][0])
    return cost if cost == cost else 0.0


def middle(rounds: list[dict[str, Any]], name: str, key: str) -> float:
    """The median over the rounds; rounds without a number (nan) are left out."""
    values = [each["engines"][name][key] for each in rounds]
    values = [value for value in values if value == value]
    return statistics.median(values) if values else float("nan")


def with_interval(rounds: list[dict[str, Any]], name: str, key: str) -> str:
    values = [each["engines"][name][key] for each in rounds]
    if len(values) == 1:
        return f"{values[0]:.3f}"
    low, high = mean_interval(values)
    return f"{statistics.median(values):.3f} ({low:.3f}, {high:.3f})"


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("What speculation gains", result),
        f"- Before the first round, every engine computes a step of each number of tokens whose steps are recorded. "
        f"{result['tokens']} tokens of each request, temperature {result['temperature']:g}; "
        f"{result['rounds']} rounds in turns, all engines on the same prompts of a round. "
        + ("All engines of Quire gave the same tokens." if result["is_exact"] else "Drafts are accepted at random."),
        "- gain: decoded tokens per second divided by those without speculation, median of the rounds (95% interval of "
        "the mean). first: the time until every request has its first token, divided likewise. k: the drafts of a "
        "request in a step. a: the share of accepted drafts among those whose predecessors were accepted. c: a step "
        f"that verifies {result['drafts']} drafts of each request, over a step of one token. d: a step of the draft "
        "model, or the time of a head for a draft of each request, over a step of one token.",
        "- all run: the gain from the time when all requests have a token until the first request ends. possible: "
        f"E / (c (k + 1) + k d) of these steps. share: all run over possible; {WANTED_SHARE:.0%} are wanted.",
        "",
        *report.table_head(
            "text | weights | requests | drafts by | gain | first | k | a | c | d | all run | possible | share | "
            "tokens/s"
        ),
    ]
    for case in result["cases"]:
        rounds, where = case["rounds"], f"{case['workload']} | {case['format']} | {case['requests']}"
        cost = rounds[0]["costs"][-1]
        for name, one in rounds[0]["engines"].items():
            if "gain" not in one:
                continue
            possible = middle(rounds, name, "possible")
            share = statistics.median(
                each["engines"][name]["full_gain"] / each["engines"][name]["possible"] for each in rounds
            )
            draft = draft_cost_of(rounds, name)
            lines.append(
                f"| {where} | {name} | {with_interval(rounds, name, 'gain')} | "
                f"{with_interval(rounds, name, 'first_token')} | "
                f"{middle(rounds, name, 'drafts'):.2f} | {middle(rounds, name, 'acceptance'):.2f} | {cost:.2f} | "
                f"{draft:.2f} | {middle(rounds, name, 'full_gain'):.2f} | {possible:.2f} | {share:.0%} | "
                f"{middle(rounds, name, 'tokens_per_second'):.1f} |"
            )
    lines += ["", *beside_fixed(result), *beside_itself(result), *peers(result), *wanted(result)]
    return "\n".join(lines) + "\n"


def beside_fixed(result: dict[str, Any]) -> list[str]:
    """The gain of adaptive depths divided by the best gain of the fixed depths and of no speculation (median of
    rounds).
    """
    lines = []
    for case in result["cases"]:
        rounds, names = case["rounds"], case["rounds"][0]["engines"]
        for name in [name for name in names if any(other.startswith(name + ALWAYS) for other in names)]:
            fixed = [OFF, *(other for other in names if other.startswith(name + ALWAYS))]
            best = max(fixed, key=lambda other: middle(rounds, other, "gain"))
            ratios = [each["engines"][name]["gain"] / each["engines"][best]["gain"] for each in rounds]
            low, high = min(ratios), max(ratios)
            lines.append(
                f"- {case['workload']}, {case['format']}, {case['requests']} requests, {name}: "
                f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) of the best fixed depth ({best})."
            )
    return [*lines, ""] if lines else []


def beside_itself(result: dict[str, Any]) -> list[str]:
    """An engine with drafts divided by the same engine without them: tokens per second, and the time until every
    request has its first token (median of rounds, and the 95% interval of the mean).
    """
    lines = []
    for case in result["cases"]:
        rounds = case["rounds"]
        for name in [name for name in rounds[0]["engines"] if name + SWITCHED in rounds[0]["engines"]]:
            pairs = [(each["engines"][name], each["engines"][name + SWITCHED]) for each in rounds]
            rates = [on["decode_tokens_per_second"] / off["decode_tokens_per_second"] for on, off in pairs]
            firsts = [on["first_seconds"] / off["first_seconds"] for on, off in pairs]
            rate, first = (
                f"{statistics.median(ratios):.3f} ({' to '.join(f'{bound:.3f}' for bound in mean_interval(ratios))})"
                for ratios in (rates, firsts)
            )
            lines.append(
                f"- {case['workload']}, {case['format']}, {case['requests']} requests, {name}, over the same engine "
                f"without drafts: tokens per second {rate}, first token {first}."
            )
    return [*lines, ""] if lines else []


def peers(result: dict[str, Any]) -> list[str]:
    """Quire divided by each peer, without and with speculation; with speculation, by the best of Quire's adaptive
    methods.
    """
    if not result["peers"]:
        return []
    lines = [
        "- Quire/peer: tokens a second, prompts included. decoding: without the time to the first tokens, which is "
        "that of an answer of one token for a peer.",
        "",
    ]
    lines += report.table_head(
        "text | weights | requests | peer | off, tokens/s | on | Quire/peer off | Quire/peer on | decoding off | "
        "decoding on"
    )
    for case in result["cases"]:
        rounds = case["rounds"]
        own = [
            name
            for name, one in rounds[0]["engines"].items()
            if "gain" in one and ALWAYS not in name and not name.endswith(SWITCHED)
        ]
        best = max(own, key=lambda name: middle(rounds, name, "tokens_per_second"))
        for peer in result["peers"]:
            cells = []
            for key in ("tokens_per_second", "decode_tokens_per_second"):
                for state, name in (("off", OFF), ("on", best)):
                    pairs = [(each["engines"][name], each["engines"][f"{peer} {state}"]) for each in rounds]
                    cells.append(f"{statistics.median(ours[key] / theirs[key] for ours, theirs in pairs):.2f}")
            rates = " | ".join(f"{middle(rounds, f'{peer} {on}', 'tokens_per_second'):.1f}" for on in ("off", "on"))
            where = f"{case['workload']} | {case['format']} | {case['requests']}"
            lines.append(f"| {where} | {peer} | {rates} | {' | '.join(cells)} |")
    return [*lines, ""]


def wanted(result: dict[str, Any]) -> list[str]:
    """Whether copy-edit reached the gains that are wanted. Drafts that hold at random reach none."""
    if result["rates"]:
        return []
    lines = []
    for case in result["cases"]:
        if (case["workload"], case["requests"]) != ("copy-edit", 1) or case["format"] not in WANTED_GAIN:
            continue
        names = [name for name, one in case["rounds"][0]["engines"].items() if "gain" in one and name != OFF]
        gains = {name: middle(case["rounds"], name, "gain") for name in names}
        best = max(gains, key=lambda name: gains[name], default=OFF)
        found = gains.get(best, 1.0)
        goal = WANTED_GAIN[case["format"]]
        verdict = "reached" if found >= goal else "missed"
        lines.append(f"- copy-edit, {case['format']}, one request: {found:.2f} ({best}), {goal:g} wanted: {verdict}.")
    return lines


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the models are, or are written")
    parser.add_argument("--workloads", nargs="+", default=["chat", "copy-edit"], choices=["chat", "copy-edit"])
    parser.add_argument("--shape", type=Path, metavar="MODEL", help="a folder with weights, in place of the workloads")
    parser.add_argument("--rates", type=float, nargs="+", help="shares of drafts that are accepted, at random")
    parser.add_argument("--formats", nargs="+", default=["none", "int4"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--methods", nargs="*", default=["ngram", "suffix", "draft_model"])
    parser.add_argument("--drafts", type=int, default=7, help="most drafts of a request in a step")
    parser.add_argument("--fixed", type=int, nargs="*", default=[])
    parser.add_argument("--switched", action="store_true", help="also compare an engine with itself without drafts")
    parser.add_argument("--again", action="store_true", help="also compare a second engine without speculation")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, help="of each prompt of --shape, and at least of chat")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--draft-steps",
        type=int,
        default=600,
        help="of the draft model's training; 0: the bundled one, which is too good",
    )
    parser.add_argument("--small", action="store_true", help="write small models, to try the script")
    parser.add_argument("--peer", nargs=3, action="append", default=[], metavar=("NAME", "OFF", "ON"))
    parser.add_argument("--name", default="speculation", help="of the result files")
    arguments = parser.parse_args()
    if arguments.tokens > TEXT_TOKENS:
        parser.error(f"--tokens is at most {TEXT_TOKENS}, the length of the texts that are copied")
    if ("mtp" in arguments.methods) > bool(arguments.shape) or ("eagle3" in arguments.methods and arguments.shape):
        parser.error("mtp needs --shape, and eagle3 has a head for chat only")
    if arguments.rates is None:
        arguments.rates = SHAPE_RATES if arguments.shape else ()
    if arguments.prompt_tokens is None:
        arguments.prompt_tokens = SHAPE_PROMPT if arguments.shape else 0
    environment = report.environment("python", "benchmarks/speculation.py")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.shape:
        first_layers(arguments.shape, arguments.folder / "first layers", SHAPE_LAYERS)
        if (target := shape_target(arguments)) != arguments.shape:
            with_mtp(arguments.shape, target)
    else:
        write_models(arguments.folder, arguments.draft_steps, arguments.small)
    cases = []
    for workload in ["shape"] if arguments.shape else arguments.workloads:
        for form in arguments.formats:
            case = Case(arguments, workload, form)
            rounds: dict[int, list[dict[str, Any]]] = {requests: [] for requests in arguments.requests}
            for number in range(arguments.rounds + 1):
                for requests, found in rounds.items():
                    one = case.round(number, requests)
                    if number:  # the first one warms up
                        found.append(one)
            for requests, found in rounds.items():
                case.add_possible_gains(requests, found)
            case.close()
            cases += [
                {"workload": workload, "format": form, "requests": requests, "rounds": found}
                for requests, found in rounds.items()
            ]
    result = {
        **environment,
        "shape": arguments.shape and arguments.shape.name,
        "tokens": arguments.tokens,
        "temperature": arguments.temperature,
        "rounds": arguments.rounds,
        "drafts": arguments.drafts,
        "rates": list(arguments.rates),
        "is_exact": is_exact(arguments),
        "peers": [name for name, *_ in arguments.peer],
        "cases": cases,
    }
    print(markdown(result))
    if arguments.save:
        numbers = json.loads(json.dumps(result), parse_constant=lambda constant: None)  # JSON has no nan
        report.save_published(__file__, arguments.name, arguments.save, numbers, markdown(result))


if __name__ == "__main__":
    main()
