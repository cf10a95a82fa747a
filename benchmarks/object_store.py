"""The rate at which weights come from an object store, against the client library alone.

Both read the same objects with as many requests at once, of the same size. The library's bytes are dropped; ours become
tensors. Both take turns; the result is the median of the rounds' ratios. The claim: at least 0.8.

    python benchmarks/object_store.py s3://bucket/folder [--rounds 5] [--http] [--save HARDWARE]

--save writes benchmarks/results/HARDWARE/object_store_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore

from quire.loader.hub import resolve_model
from quire.loader.object_store import NUM_READERS, RETRIES, list_objects, piece_bytes
from quire.loader.safetensors import open_checkpoint
from quire.measure import report


def library_alone(folder: str, is_plain: bool) -> int:
    """Read all weights with the client library; the number of bytes."""
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
    """Read all weights as the loader does; the number of bytes."""
    return sum(tensor.nbytes for _, tensor in open_checkpoint(resolve_model(folder)).tensors())


def rate(read: Callable[[], int]) -> float:
    """GB/s."""
    start = time.perf_counter()
    return read() / (time.perf_counter() - start) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="URL of a model with safetensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--http", action="store_true", help="the endpoint is not encrypted")
    parser.add_argument("--save", metavar="HARDWARE", help="write result files with this name of the machine")
    args = parser.parse_args()
    resolve_model(args.folder)
    reads = {"library": lambda: library_alone(args.folder, args.http), "quire": lambda: as_tensors(args.folder)}
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
    print("\n".join(lines))
    if args.save:
        report.save_published(Path(__file__).parent, "object_store", args.save, result, "\n".join(lines) + "\n")
    return 0 if statistics.median(ratios) >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
