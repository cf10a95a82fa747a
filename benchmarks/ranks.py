"""Ranks on one machine: the time of their exchange beside gloo and a copy, and decodes and starts beside one process.

    python benchmarks/ranks.py exchange [--rounds 9] [--save HARDWARE]
    python benchmarks/ranks.py decodes [--quantization int4] [--rows 1 8 32] [--rounds 5] [--steps 8] [--save HARDWARE]
    python benchmarks/ranks.py machines [--rows 1 8 32] [--rounds 5] [--steps 8] [--save HARDWARE]
    python benchmarks/ranks.py sampling [--rows 1 8 32] [--rounds 5] [--steps 8] [--save HARDWARE]
    python benchmarks/ranks.py replicas [--quantization int4] [--rows 2 8 32] [--rounds 5] [--steps 8] [--save HARDWARE]
    python benchmarks/ranks.py start [--rounds 5] [--save HARDWARE]

`exchange`: two processes, one thread each, join columns (Group.gather) as ranks of one machine and as those of two,
over the loopback interface; gather and reduce by torch.distributed with gloo, over that interface too; and copy
(memcpy, both at once). Bytes count the result of each process. `decodes`: random weights with the shape
of Qwen3-0.6B; one process with all threads, and ranks of one thread. There may be more ranks than cores. All engines
exist at the same time, and take turns. `machines`: two ranks of one thread on one machine, beside the same ranks on two
machines, which are two addresses of this one. `sampling`: steps of two ranks of the same model, with and without
--enable-batch-sharded-sampling. `replicas`: steps of two engines of one thread that decode half of the rows each at the
same time, beside one engine with two threads. No server with `-dp 2` can be faster. `start`: a checkpoint of that
shape, in the file cache; seconds from the command to a ready `LLM`. Rounds in which other programs had more than a
tenth of a core are left out. --save writes benchmarks/results/HARDWARE/ranks_WHAT_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed
from predict import SHAPES

from quire import envs
from quire.config import EngineConfig
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import SharedMemoryGroup, make_memory, ranks_on
from quire.engine.core import EngineCore
from quire.engine.start import start_engine
from quire.kernels import cpu
from quire.loader.safetensors_writer import write_tensors
from quire.measure import report
from quire.messages import AddRequest
from quire.model_config import load_model_config
from quire.models.form import ModelForm
from quire.models.registry import build_model
from quire.planning import devices
from quire.sampling_params import SamplingParams

MODEL = SHAPES["qwen3-0.6b"]
SIZES = (4 << 10, 64 << 10, 1 << 20, 32 << 20)  # bytes of a result
ROUND_SECONDS = 0.2
WAYS = ("ranks join", "ranks of two machines join", "gloo gathers", "gloo reduces", "memcpy")
CONTEXT = 2  # tokens of a prompt
MOST_DISTURBED, MOST_TRIES = 0.1, 3  # for a start: the cores that others may use, and the tries for each wanted round
START = """
import sys
from quire import LLM
sizes = {"tensor_parallel_size": int(sys.argv[2]), "num_threads": int(sys.argv[3]), "max_model_len": 1024}
llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, **sizes)
print("ready", flush=True)
llm.llm_engine.core.shutdown()
"""


def exchange_as(rank: int, memory: int, link: socket.socket, meeting: str, rounds: int, answer: Connection) -> None:
    """Run one of two processes. It sends the seconds of one exchange for each way, size and round to `answer`."""
    cpu.set_num_threads(1)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    far, links = Grid(2, num_nodes=2), {1 - rank: link.detach()}
    both = [
        ranks_on(memory, rank, Grid(2), has_own_cores=True, timeout_seconds=60.0),
        ranks_on(make_memory(far), rank, far, links, has_own_cores=True, timeout_seconds=60.0),
    ]
    group, group_of_two = (ranks.group for ranks in both)
    assert isinstance(group, SharedMemoryGroup)
    assert isinstance(group_of_two, SharedMemoryGroup)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found: dict[str, dict[int, list[float]]] = {way: {} for way in WAYS}
    for size in SIZES:
        elements = size // 2
        part = torch.ones(1, elements // 2, dtype=torch.bfloat16)
        out, other = torch.empty(1, elements, dtype=torch.bfloat16), torch.empty(1, elements, dtype=torch.bfloat16)
        halves = list(out.view(2, -1).unbind())
        run: dict[str, Callable[[], object]] = {
            "ranks join": partial(cpu.gather, group._shared, part, [part.shape[1]] * 2, out),
            "ranks of two machines join": partial(cpu.gather, group_of_two._shared, part, [part.shape[1]] * 2, out),
            "gloo gathers": partial(torch.distributed.all_gather, halves, part.view(-1)),
            "gloo reduces": partial(torch.distributed.all_reduce, other),
            "memcpy": partial(out.copy_, other),
        }
        counts = {way: agreed(count_for(run[way])) for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                torch.distributed.barrier()
                begin = time.perf_counter()
                for _ in range(counts[way]):
                    run[way]()
                found[way].setdefault(size, []).append((time.perf_counter() - begin) / counts[way])
    answer.send(found)
    torch.distributed.barrier()
    for ranks in both:
        ranks.close()


def count_for(run: Callable[[], object]) -> int:
    """The number of runs in ROUND_SECONDS. Both processes call this function together."""
    for _ in range(3):
        run()
    begin = time.perf_counter()
    for _ in range(4):
        run()
    return max(int(4 * ROUND_SECONDS / (time.perf_counter() - begin)), 2)


def agreed(count: int) -> int:
    """The smaller count of the two processes."""
    least = torch.tensor([count])
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


def exchange(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure `exchange`. A round takes as long as the slower process needs."""
    memory, links = make_memory(Grid(2)), tcp_pair()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(
                target=exchange_as, args=(rank, memory, links[rank], f"{folder}/meeting", arguments.rounds, theirs)
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        first, second = (ours.recv() for ours, _ in pipes)
        for process in processes:
            process.join()
    os.close(memory)
    for link in links:
        link.close()
    seconds = {
        way: {size: [max(pair) for pair in zip(first[way][size], second[way][size], strict=True)] for size in SIZES}
        for way in WAYS
    }
    columns = [f"{way}, us" for way in WAYS]
    columns += ["ranks over gloo's gather", "over its reduce", "of two machines over its gather", "memcpy over ranks"]
    lines = report.table_head(" | ".join(["result", *columns]))
    for size in SIZES:
        cells = [f"{1e6 * statistics.median(seconds[way][size]):,.1f}" for way in WAYS]
        cells += [ratio(seconds["ranks join"][size], seconds[way][size]) for way in ("gloo gathers", "gloo reduces")]
        cells.append(ratio(seconds["ranks of two machines join"][size], seconds["gloo gathers"][size]))
        cells.append(ratio(seconds["memcpy"][size], seconds["ranks join"][size]))
        lines.append(f"| {size >> 10:,} KiB | {' | '.join(cells)} |")
    return {"seconds": seconds}, lines


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over the loopback interface, as nodes have it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def write_model(folder: Path) -> None:
    """Write a checkpoint with random weights."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    shapes = build_model(load_model_config(folder), ModelForm(torch.bfloat16)).expected_weights()
    weights = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in sorted(shapes.items())}
    write_tensors(folder / "model.safetensors", weights)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The median of the rounds' ratios, with the least and the largest."""
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


def decodes(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure `decodes`: the median step of each round. The processes of an engine sleep while others compute."""
    num_cores = devices.num_cores()
    widths = (1, 2, 2 * num_cores)
    engines = {
        f"tp {width}": {"tensor_parallel_size": width, "num_threads": max(num_cores // width, 1)} for width in widths
    }
    alone = {name: [settings] for name, settings in engines.items()}
    rounds = in_turns(alone, [(rows, 0.0) for rows in arguments.rows], arguments)
    one, *others = engines
    lines = report.table_head(
        "rows | " + " | ".join(f"{name}, ms" for name in engines) + f" | tokens of {others[0]} over {one} | "
        f"of {others[-1]} over {one}"
    )
    for (rows, _), each in rounds.items():
        cells = [f"{1e3 * statistics.median(seconds):.1f}" for seconds in each.values()]
        cells += [ratio(each[one], each[other]) for other in others]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
    return {"rounds": {rows: each for (rows, _), each in rounds.items()}}, lines


def sampling(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure `sampling`: steps in which the first of two ranks samples all rows, and steps in which both sample."""
    sizes = {"tensor_parallel_size": 2, "num_threads": max(devices.num_cores() // 2, 1)}
    engines = {"first": sizes, "each": sizes | {"enable_batch_sharded_sampling": True}}
    asks = [(rows, temperature) for temperature in (0.0, 1.0) for rows in arguments.rows]
    rounds = in_turns({name: [settings] for name, settings in engines.items()}, asks, arguments)
    lines = report.table_head("rows | temperature | the first samples, ms | each samples, ms | each over the first")
    for (rows, temperature), each in rounds.items():
        cells = [f"{1e3 * statistics.median(seconds):.1f}" for seconds in each.values()]
        lines.append(f"| {rows} | {temperature:g} | {' | '.join(cells)} | {ratio(each['each'], each['first'])} |")
    return {"rounds": [{"rows": rows, "temperature": heat, **each} for (rows, heat), each in rounds.items()]}, lines


def machines(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure `machines`: steps of two ranks that share memory, and of two that send each other what they write."""
    sizes = {"tensor_parallel_size": 2, "num_threads": max(devices.num_cores() // 2, 1)}
    with socket.create_server(("127.0.0.2", 0)) as taken:
        place = {"master_addr": "127.0.0.2", "master_port": taken.getsockname()[1]}
    engines = {"one": [sizes], "two": [sizes | place | {"nnodes": 2}]}
    return _one_and_two(engines, "machine", arguments)


def replicas(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure `replicas`: the median step of each round. Each of two engines with one thread has half of the rows."""
    engines = {"one": [{"num_threads": 2}], "two": [{"num_threads": 1}] * 2}
    return _one_and_two(engines, "engine", arguments)


def _one_and_two(
    engines: dict[str, list[dict[str, Any]]], kind: str, arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Measure the engines `one` and `two` in turns. `kind`: of what there are one and two."""
    rounds = in_turns(engines, [(rows, 0.0) for rows in arguments.rows], arguments)
    lines = report.table_head(f"rows | one {kind}, ms | two {kind}s, ms | tokens of two over one")
    for (rows, _), each in rounds.items():
        cells = [f"{1e3 * statistics.median(seconds):.1f}" for seconds in each.values()]
        lines.append(f"| {rows} | {' | '.join(cells)} | {ratio(each['one'], each['two'])} |")
    return {"rounds": {rows: each for (rows, _), each in rounds.items()}}, lines


Ask = tuple[int, float]  # rows, and their temperature


def in_turns(
    engines: dict[str, list[dict[str, Any]]], asks: Sequence[Ask], arguments: argparse.Namespace
) -> dict[Ask, dict[str, list[float]]]:
    """The seconds of a step in each round, by ask and name. All engines have the same random weights.

    Args:
        engines: for each name, the settings of its engines. They share the rows and decode at the same time.
    """
    found: dict[Ask, dict[str, list[float]]] = {ask: {name: [] for name in engines} for ask in asks}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        context, asked, processes = multiprocessing.get_context("spawn"), dict[str, list[Connection]](), []
        for name, of_each in engines.items():
            asked[name] = []
            for settings in of_each:
                ours, theirs = context.Pipe()
                process = context.Process(target=decode_in, args=(Path(folder), settings, arguments, theirs))
                process.start()
                theirs.close()
                ours.recv()
                asked[name].append(ours)
                processes.append(process)
        for rows, temperature in asks:
            for number in range(-1, arguments.rounds):  # the first one records steps
                for name in engines if number % 2 else reversed(engines):
                    for each in asked[name]:
                        each.send((rows // len(asked[name]), temperature))
                    seconds = statistics.mean(each.recv() for each in asked[name])
                    if number >= 0:
                        found[rows, temperature][name].append(seconds)
        for each in (each for of_name in asked.values() for each in of_name):
            each.close()
        for process in processes:
            process.join()
    return found


def decode_in(folder: Path, settings: dict[str, Any], arguments: argparse.Namespace, asked: Connection) -> None:
    """Run a process with one engine, which answers each number of rows with the time of a step."""
    most = max(arguments.rows)
    config = EngineConfig.from_kwargs(
        model=str(folder),
        device="cpu",
        quantization=arguments.quantization,
        max_model_len=512,
        max_num_seqs=most,
        max_num_batched_tokens=max(512, most * CONTEXT),
        num_gpu_blocks_override=most * ((CONTEXT + arguments.steps) // 16 + 3),
        enable_prefix_caching=False,
        **settings,
    )
    os.environ[envs.CLUSTER_KEY.name] = "of this benchmark"
    with ExitStack() as opened:
        if config.nnodes > 1:
            node = opened.enter_context(
                subprocess.Popen([sys.executable, "-m", "quire.entry.node"], stdin=subprocess.PIPE)
            )
            assert node.stdin is not None
            node.stdin.write(msgspec.json.encode(replace(config, node_rank=1, headless=True)) + b"\n")
            node.stdin.flush()
        core = start_engine(config, folder, is_server=False, progress=lambda phase, share, detail: None).core
        opened.callback(core.shutdown)
        asked.send(None)
        with suppress(EOFError):
            while True:
                rows, temperature = asked.recv()
                asked.send(step_seconds(core, rows, temperature, arguments.steps))


def step_seconds(core: EngineCore, rows: int, temperature: float, steps: int) -> float:
    """The median time of a decode step."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=steps + 4, ignore_eos=True)
    for row in range(rows):
        prompt = [10 + (7 * row + 3 * position) % 1000 for position in range(CONTEXT)]
        core.add(AddRequest(f"{row}", prompt, params, steps + 4))
    seconds = []
    while core.has_work():
        core.step()
        record = core.last_record
        if record is not None and record.num_decode_tokens == rows and not record.num_prefill_tokens:
            seconds.append(record.step_seconds)
    return statistics.median(seconds[2:])


def starts(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure `start`, in turns. A first start of each reads the file and fills the caches for later starts."""
    num_cores, rounds, num_disturbed = devices.num_cores(), list[dict[int, float]](), 0
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for number in range(-1, MOST_TRIES * arguments.rounds):
            order = (1, 2) if number % 2 else (2, 1)
            before, begin = report.others_seconds(), time.perf_counter()
            found = {width: started_in(folder, width, num_cores // width) for width in order}
            disturbed = (report.others_seconds() - before) / (time.perf_counter() - begin)
            print(f"round {number}: {found}, others had {disturbed:.2f} of a core", file=sys.stderr)
            if disturbed > MOST_DISTURBED:
                num_disturbed += 1
            elif number >= 0:
                rounds.append(found)
            if len(rounds) == arguments.rounds:
                break
        else:
            sys.exit(f"other programs compute: {num_disturbed} rounds were disturbed")
    of = {width: [found[width] for found in rounds] for width in (1, 2)}
    lines = report.table_head("tp 1, s | tp 2, s | tp 2 over tp 1")
    cells = [f"{statistics.median(seconds):.2f}" for seconds in of.values()]
    note = f"Rounds left out because other programs had more than {MOST_DISTURBED:g} of a core: {num_disturbed}."
    table = [*lines, f"| {' | '.join(cells)} | {ratio(of[2], of[1])} |", "", note]
    return {"rounds": rounds, "num_disturbed": num_disturbed}, table


def started_in(folder: str, width: int, num_threads: int) -> float:
    """The seconds until a process is ready."""
    begin = time.perf_counter()
    command = [sys.executable, "-P", "-c", START, folder, str(width), str(num_threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        if "ready" not in process.stdout.read(5):
            sys.exit(f"it did not start: {command}")
        return time.perf_counter() - begin


TITLES = {
    "exchange": "Two ranks join results through shared memory",
    "decodes": "Decode steps of ranks beside one process",
    "machines": "Two ranks on two machines, beside one machine",
    "sampling": "Two ranks that each sample some rows, beside the first one that samples all",
    "replicas": "Decode steps of two engines of one thread beside one of two threads",
    "start": "A start with two ranks beside one process",
}
RUN = {
    "exchange": exchange,
    "decodes": decodes,
    "machines": machines,
    "sampling": sampling,
    "replicas": replicas,
    "start": starts,
}


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("what", choices=RUN)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/ranks.py")
    result, table = RUN[arguments.what](arguments)
    result = {**environment, **result}
    form = f", {arguments.quantization or 'bfloat16'}" if arguments.what not in ("exchange", "start") else ""
    text = "\n".join(
        [
            *report.heading(TITLES[arguments.what] + form, result),
            f"- Medians of {arguments.rounds} rounds in turns; ratios are medians of the rounds' (least to largest).",
            "",
            *table,
        ]
    )
    name = f"ranks_{arguments.what}" + (f"_{arguments.quantization or 'bf16'}" if form else "")
    report.publish(__file__, arguments.save, name, result, text + "\n")


if __name__ == "__main__":
    main()
