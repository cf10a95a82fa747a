"""`quire simulate [MODEL] [flags of serve] [flags of bench serve]`: a load on a server that is predicted, not run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from quire.cli.bench import progress_bar, say_result
from quire.cli.flags import Parser, add_config_flags
from quire.cli.settings import add_settings_flags, read_settings
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measure.options import Report, Target, Traffic, Workload, from_args, given

DESCRIPTION = """
Scheduler, pages of the KV cache and limit of the queue are the same as in a server with these settings. A step takes as
long as the engine predicts. Nothing is loaded. The report is that of `quire bench serve`.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="predict what `bench serve` would measure, without loading the model",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workload", metavar="NAME", help="chat, rag, code, random:IN/OUT in tokens, or a file of requests")
    add("--trace", metavar="FILE", help="requests with their times, as --dataset-name timed_trace reads them; all")
    add_settings_flags(parser, (EngineConfig,))
    add_config_flags(parser, Workload, skip=frozenset({"seed"}))  # the engine's
    for group in (Traffic, Report):
        add_config_flags(parser, group)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Returns the exit code: 0, or 1 if no request was answered."""
    config, _ = read_settings(parser, args)
    if config.speculative_config is not None:
        raise ConfigError(
            "Drafts are not simulated: nothing says which of them would hold",
            fix="Leave --speculative-config out",
            param="speculative_config",
        )
    if config.data_parallel_size > 1:
        raise ConfigError(
            "One engine is simulated",
            value=config.data_parallel_size,
            fix="Leave --data-parallel-size out, and give its share of the threads with --num-threads",
            param="data_parallel_size",
        )
    workload, traffic, options = _workload(args, config.seed or 0), from_args(Traffic, args), from_args(Report, args)
    from quire.entry.launch import find_model, read_tokenizer
    from quire.measure import report
    from quire.measure.prepared_load import PreparedLoad
    from quire.planning.hardware import this_machine
    from quire.simulate.run import simulate

    folder, name, model = find_model(config, None, weights=False)
    device = this_machine(config.device)
    load = PreparedLoad(workload, traffic, read_tokenizer(config, folder), is_chat=False, ignore_eos=True)
    bar = partial(progress_bar, options.disable_tqdm)
    percentiles, limits = options.percentiles(), options.limits_ms()
    runs, facts = simulate(name, config, model, device, load, bar, percentiles, limits)
    workload = replace(workload, num_prompts=len(runs[0].outcomes))  # a trace's requests are counted only now
    result = report.serving_result(workload, traffic, Target(), options, runs, facts)
    return say_result(result, runs, options, traffic)


def _workload(args: argparse.Namespace, seed: int) -> Workload:
    """The options of --workload or --trace. Flags of single options override them."""
    from quire.measure.workload import ALL, named_workload

    if args.workload is not None and args.trace is not None:
        raise ConfigError("A trace is a workload", value=args.workload, fix="Leave --workload or --trace out")
    chosen = Workload() if args.workload is None else named_workload(args.workload)
    if args.trace is not None:
        chosen = Workload(dataset_name="timed_trace", dataset_path=args.trace, num_prompts=ALL)
    return replace(chosen, **given(Workload, args) | {"seed": seed})
