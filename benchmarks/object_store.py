"""The rate at which weights come from an object store, against the client library alone.

Both read the same objects with as many requests at once, of the same size. The library's bytes are dropped; ours become
tensors. Both take turns; the result is the median of the rounds' ratios. The claim: at least 0.8.

Before each turn some memory is written to and given back. A hypervisor may have taken free pages away, and gives them
again so slowly that nothing else would be measured (benchmarks/NOTES.md).

    python benchmarks/object_store.py s3://bucket/folder [--rounds 5] [--http] [--save HARDWARE]
    python benchmarks/object_store.py Qwen3-8B [--tls] [--gbits 10] [--rounds 5] [--save HARDWARE]

The second form starts a server on this machine that has weights of this shape (object_server.py), as fast as it goes or
as a network of this many Gbit/s, with http:// or with TLS and a certificate of its own. It shares the cores with the
measured code. --save writes benchmarks/results/HARDWARE/object_store_NAME_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import object_server
import obstore

from quire.loader.hub import resolve_model
from quire.loader.object_store import NUM_READERS, RETRIES, list_objects, piece_bytes
from quire.loader.safetensors import open_checkpoint
from quire.measure import report

TOUCHED_BYTES = 3 << 30


def library_alone(folder: str, is_plain: bool) -> int:
    """Read all weights with the client library. Returns the number of bytes."""
    store = obstore.store.from_url(folder, client_options={"allow_http": is_plain}, retry_config=RETRIES)
    places = [
        (each.name, begin, min(begin + piece_bytes(each.size), each.size))
        for each in list_objects(folder)
        if each.name.endswith(".safetensors")
        for begin in range(0, each.size, piece_bytes(each.size))
    ]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        read = pool.map(lambda place: len(obstore.get_range(store, place[0], start=place[1], end=place[2])), places)
        return sum(read)


def as_tensors(folder: str) -> int:
    """Read all weights as the loader does. Returns the number of bytes."""
    return sum(tensor.nbytes for _, tensor in open_checkpoint(resolve_model(folder)).tensors())


def rate(read: Callable[[], int]) -> float:
    """The rate of a read in GB/s."""
    np.ones(TOUCHED_BYTES, dtype=np.uint8)
    start = time.perf_counter()
    return read() / (time.perf_counter() - start) / 1e9


@contextmanager
def started(model: str, gbits: float, *, with_tls: bool) -> Iterator[str]:
    """The URL of a model of this shape in a server on this machine. The loader's mirror has a folder of its own."""
    serving = object_server.serving(model, gbits, with_tls=with_tls)
    with serving as variables, tempfile.TemporaryDirectory() as cache:
        os.environ |= {**variables, "QUIRE_CACHE_DIR": cache}
        yield object_server.FOLDER


def main() -> int:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", help=f"URL of a folder with safetensors, or {' or '.join(object_server.SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--http", action="store_true", help="the endpoint of the URL is not encrypted")
    parser.add_argument("--tls", action="store_true", help="the server on this machine speaks https://")
    parser.add_argument("--gbits", type=float, default=0.0, help="of the network of the server on this machine")
    args = parser.parse_args()
    if args.model not in object_server.SHAPES:
        return compare(args, args.model, args.http)
    with started(args.model, args.gbits, with_tls=args.tls) as folder:
        return compare(args, folder, not args.tls)


def compare(args: argparse.Namespace, folder: str, is_plain: bool) -> int:
    """Measure, print and save. Returns the exit code."""
    resolve_model(folder)
    reads = {"library": lambda: library_alone(folder, is_plain), "quire": lambda: as_tensors(folder)}
    rounds = []
    for number in range(args.rounds):
        names = list(reads) if number % 2 else list(reads)[::-1]
        rates = {name: rate(reads[name]) for name in names}
        print(f"library {rates['library']:.2f} GB/s, quire {rates['quire']:.2f} GB/s", flush=True)
        rounds.append(rates)
    ratios = [each["quire"] / each["library"] for each in rounds]
    result = {**report.environment("python", "benchmarks/object_store.py"), "rounds": rounds}
    lines = [
        *report.heading("Weights from an object store, beside the client library alone", result),
        f"- **{statistics.median(ratios):.2f}** of the library's rate ({min(ratios):.2f} to {max(ratios):.2f},"
        f" {len(ratios)} rounds in turns).",
        "",
        *report.table_head("round | library, GB/s | Quire, GB/s"),
        *(f"| {at} | {each['library']:.2f} | {each['quire']:.2f} |" for at, each in enumerate(rounds, 1)),
    ]
    name = f"object_store_{Path(args.model).name}" + "-tls" * args.tls
    name += f"-{args.gbits:g}gbits" if args.gbits else ""
    report.publish(__file__, args.save, name, result, "\n".join(lines) + "\n")
    return 0 if statistics.median(ratios) >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
