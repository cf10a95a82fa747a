"""`quire bench serve | throughput | latency | startup | compare`, with vLLM's option names, labels and JSON keys."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.flags import Parser, Refused, add_config_flags
from quire.cli.settings import add_settings_flags, read_settings
from quire.compat.bench_flags import ABSENT_BENCH_FLAGS
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measure.options import Report, Target, Traffic, Workload, from_args

if TYPE_CHECKING:
    from quire.measure.load import Run


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure a server or the engine, and compare", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="bench", metavar="BENCHMARK", required=True)

    def add(name: str, help: str, run: Callable[..., int]) -> Any:
        made = kinds.add_parser(name, help=help, description=help, allow_abbrev=False)
        made.set_defaults(run=partial(run, made) if run in _IN_PROCESS else run)
        return made

    serve = add("serve", "send a workload to a running server", _serve)
    for group in (Workload, Traffic, Target, Report):
        add_config_flags(serve, group)

    throughput = add("throughput", "requests per second of the engine in this process", _throughput)
    add_settings_flags(throughput, (EngineConfig,))
    add_config_flags(throughput, Workload, skip=frozenset({"seed"}))
    _numbers(throughput, {"n": (1, "continuations of each prompt")})
    _numbers(throughput, {"num-warmups": (0, "requests before, not counted"), "num-rounds": (1, "measurements")})

    throughput.add_argument("--lora-path", metavar="FOLDER", help="adapter of all requests, with --enable-lora")

    latency = add("latency", "seconds of one batch in this process", _latency)
    add_settings_flags(latency, (EngineConfig,))
    lengths = {"input-len": (32, "tokens of a prompt"), "output-len": (128, "tokens of an answer")}
    _numbers(latency, lengths | {"batch-size": (8, "prompts at once"), "n": (1, "continuations of each prompt")})
    _numbers(latency, {"num-iters-warmup": (10, "batches before, not counted"), "num-iters": (30, "batches")})

    startup = add("startup", "seconds from the start of a process to its first token", _startup)
    add_settings_flags(startup, (EngineConfig,))
    iterations = {"num-iters-cold": (3, "starts with the model's files not in the file cache")}
    iterations |= {"num-iters-warmup": (1, "starts before the warm ones"), "num-iters-warm": (3, "starts with them")}
    _numbers(startup, iterations)
    for each in (throughput, latency, startup):
        group = each.add_argument_group("Report")
        group.add_argument("--output-json", metavar="FILE", help="write the result as JSON")
        group.add_argument("--disable-tqdm", action=argparse.BooleanOptionalAction, default=False, help="no bars")
        if each is not startup:
            group.add_argument(
                "--disable-detokenize", action=argparse.BooleanOptionalAction, default=False, help="token ids only"
            )

    compare = add("compare", "two servers, or two result files: is the difference real?", _compare)
    compare.add_argument("a", metavar="A", help="base URL of a server, or a result file")
    compare.add_argument("b", metavar="B", help="the other one")
    compare.add_argument("--output-json", metavar="FILE", help="write the result as JSON")
    for group in (Workload, Traffic, Target, Report):
        add_config_flags(compare, group, skip=_NOT_COMPARED)
    for each in (serve, throughput, latency, startup, compare):
        for flag, why in ABSENT_BENCH_FLAGS.items():
            if flag not in each._option_string_actions:
                each.add_argument(flag, action=Refused, nargs="*", help=argparse.SUPPRESS, why=why)


_NOT_COMPARED = frozenset(
    {"base_url", "host", "port", "save_result", "save_detailed", "append_result", "result_dir", "result_filename"}
    | {"label", "metadata", "plot", "percentile_metrics"}
)


def _numbers(parser: Any, flags: dict[str, tuple[int, str]]) -> None:
    group = next((g for g in parser._action_groups if g.title == "Benchmark"), None)
    group = group or parser.add_argument_group("Benchmark")
    for name, (default, help) in flags.items():
        group.add_argument(f"--{name}", type=int, default=default, help=f"{help} (default: {default})")


def progress_bar(is_off: bool, total: int, title: str = "") -> Any:
    """A progress bar with the methods update() and close().

    Args:
        is_off: whether nothing is shown.
        total: the number of steps.
    """
    from tqdm import tqdm

    return tqdm(total=total, desc=title or None, disable=is_off, dynamic_ncols=True)


def _serve(args: argparse.Namespace) -> int:
    from quire.measure import report, serving

    groups = [from_args(group, args) for group in (Workload, Traffic, Target, Report)]
    workload, traffic, target, options = groups
    assert isinstance(workload, Workload)
    assert isinstance(traffic, Traffic)
    assert isinstance(target, Target)
    assert isinstance(options, Report)
    runs, facts = serving.run(workload, traffic, target, partial(progress_bar, options.disable_tqdm))
    result = report.serving_result(workload, traffic, target, options, runs, facts)
    return say_result(result, runs, options, traffic)


def say_result(result: dict[str, Any], runs: Sequence[Run], options: Report, traffic: Traffic) -> int:
    """Print a result of serving, write the requested files, and return the exit code."""
    from quire.measure import page, report

    text = report.serving_text(result, options)
    print(text)
    if options.plot is not None:
        Path(options.plot).write_text(page.serving_page(text, runs, result), encoding="utf-8")
        print(f"Plots: {options.plot}")
    if (path := report.save(result, options, traffic)) is not None:
        print(f"Result: {path}")
    return 0 if result["completed"] else 1


def _engine_config(parser: Parser, args: argparse.Namespace) -> EngineConfig:
    config, _ = read_settings(parser, args)
    return config


def _finish(args: argparse.Namespace, result: dict[str, Any], text: str) -> int:
    from quire.measure import offline, report

    print(text)
    print(*offline.intervals_text(result), sep="\n", end="\n" if result["confidence_intervals"] else "")
    if result.get("hardware_limit") is not None:
        print(report.limit_line(result["hardware_limit"]))
    if args.output_json is not None:
        Path(args.output_json).write_text(json.dumps(result | report.environment(), indent=4), encoding="utf-8")
    return 0


def _throughput(parser: Parser, args: argparse.Namespace) -> int:
    config = _engine_config(parser, args)
    workload = from_args(Workload, args, seed=config.seed or 0)
    from quire.measure import offline

    result = offline.throughput(
        config,
        workload,
        n=args.n,
        num_warmups=args.num_warmups,
        num_rounds=args.num_rounds,
        detokenize=not args.disable_detokenize,
        progress=not args.disable_tqdm,
        lora_path=args.lora_path,
    )
    return _finish(args, result, offline.throughput_text(result))


def _latency(parser: Parser, args: argparse.Namespace) -> int:
    config = _engine_config(parser, args)
    from quire.measure import offline

    # Prompts from the cache would not be measured; vLLM turns the cache off here too.
    if config.sources["enable_prefix_caching"] == "default":
        config = replace(config, enable_prefix_caching=False)
    result = offline.latency(
        config,
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        n=args.n,
        num_iters_warmup=args.num_iters_warmup,
        num_iters=args.num_iters,
        detokenize=not args.disable_detokenize,
        seed=config.seed or 0,
        bar=partial(progress_bar, args.disable_tqdm),
    )
    return _finish(args, result, offline.latency_text(result))


def _startup(parser: Parser, args: argparse.Namespace) -> int:
    config = _engine_config(parser, args)
    from quire.measure import startup

    result = startup.startup(
        config,
        num_iters_cold=args.num_iters_cold,
        num_iters_warmup=args.num_iters_warmup,
        num_iters_warm=args.num_iters_warm,
        bar=partial(progress_bar, args.disable_tqdm),
    )
    return _finish(args, result, startup.startup_text(result))


def _compare(args: argparse.Namespace) -> int:
    from quire.measure import compare, duel, report

    are_urls = [name.startswith(("http://", "https://")) for name in (args.a, args.b)]
    if are_urls[0] != are_urls[1]:
        raise ConfigError("A server and a file cannot be compared", value=[args.a, args.b])
    rounds = None
    if all(are_urls):
        traffic = from_args(Traffic, args)
        traffic = replace(traffic, num_rounds=getattr(args, "num_rounds", duel.NUM_ROUNDS))
        options = from_args(Report, args)
        bar = partial(progress_bar, options.disable_tqdm)
        target = from_args(Target, args)
        rounds = duel.rounds(args.a, args.b, from_args(Workload, args), traffic, target, options, bar)
        found = compare.differences(*rounds, paired=True)
    else:
        sides = [compare.read_rounds(Path(name)) for name in (args.a, args.b)]
        found = compare.differences(*sides, paired=False)
    print(compare.text(found, args.a, args.b))
    if not all(are_urls):
        print("The files were not measured in turns: a change of the machine in between looks like a difference.")
    if args.output_json is not None:
        result = {"a": args.a, "b": args.b, "differences": compare.as_json(found), "rounds": rounds}
        Path(args.output_json).write_text(json.dumps(result | report.environment(), indent=4), encoding="utf-8")
    return 0


_IN_PROCESS = (_throughput, _latency, _startup)
