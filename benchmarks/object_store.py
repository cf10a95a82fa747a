"""The rate at which weights come from an object store, against the client library alone.

Both read the same objects with as many requests at once, of the same size. The library's bytes are dropped; ours become
tensors. Run: python benchmarks/object_store.py s3://bucket/folder
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import obstore

from quire.loader.hub import resolve_model
from quire.loader.object_store import NUM_READERS, RETRIES, list_objects, piece_bytes
from quire.loader.safetensors import open_checkpoint


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--http", action="store_true", help="the endpoint is not encrypted")
    args = parser.parse_args()
    resolve_model(args.folder)
    library, ours = 0.0, 0.0
    for _ in range(args.rounds):  # in turns: the network is not always the same
        library = max(library, rate(lambda: library_alone(args.folder, args.http)))
        ours = max(ours, rate(lambda: as_tensors(args.folder)))
    print(f"library {library:.2f} GB/s, ours {ours:.2f} GB/s: {ours / library:.0%}, target 80 %")
    return 0 if ours >= 0.8 * library else 1


if __name__ == "__main__":
    sys.exit(main())
