"""Reads the folder of a PEFT adapter into checked tensors.

All names, shapes and sizes are checked before memory is taken. Files are read, not mapped: a mapped file that somebody
shortens ends the process. A file that was read before, and that the system has not seen change since, is not checked
again: see FileStamp.
Dimensions: R rank, K in-features, N out-features, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import AdapterError, WeightsError
from quire.hf_config.quantization import OUTPUT
from quire.loader.safetensors_headers import TensorEntry, read_open_header
from quire.lora.adapter_config import CONFIG_NAME, MERGE, AdapterConfig, parse_config
from quire.lora.facts import AdapterFacts
from quire.lora.paths import TENSORS_NAME
from quire.model_config import ModelConfig
from quire.models.decoder import EMBEDDINGS
from quire.models.weights import renamed
from quire.settings import ADAPTER_READ_BYTES

_MAX_CONFIG_BYTES = 1 << 20
_MAX_TEXT = 300  # characters of a message that quotes a file
# File systems count the time of a change in steps of at most this: two changes within one step look like one.
_SETTLED_NS = 2_000_000_000
_FLOATS = ("float32", "float16", "bfloat16")
_CHUNK = 32_767  # the most elements that torch handles in one thread: loading leaves the cores to steps
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_BASE = re.compile(r"(.+)\.base_layer\.weight")
_OF_EXPERTS = re.compile(r"\.experts\.|block_sparse_moe|\.(shared_expert_)?gate\.|\.router\.")
_AGAIN = "Copy the adapter's folder again"
_MAKE_SAFETENSORS = "If you trust the file, load it with PEFT and save it with save_pretrained(safe_serialization=True)"


@dataclass(frozen=True)
class AdapterModule:
    """The delta of an adapter for a weight, without its numbers.

    Attributes:
        name: the name of a shard in Hugging Face's checkpoints: `model.layers.0.self_attn.q_proj`. EMBEDDINGS is the
            lookup, OUTPUT the projection to logits, also in a model whose two share one weight.
        entries: the entries of A [R, K] and B [N, R] in the file.
    """

    name: str
    entries: tuple[TensorEntry, TensorEntry]
    scale: float

    @property
    def rank(self) -> int:
        return self.entries[0].shape[0]

    @property
    def in_features(self) -> int:
        return self.entries[0].shape[1]

    @property
    def out_features(self) -> int:
        return self.entries[1].shape[0]


@dataclass(frozen=True)
class FileStamp:
    """The system's marks of a file's content. Writing to it or replacing it changes the stamp.

    Programs can set the time of the last write, but not `changed_ns`. A change through a shared mapping that was made
    before the stamp was taken need not be noted.
    """

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStamp:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def is_settled(self, now_ns: int) -> bool:
        """Whether a change from now on gives another stamp: the last change is no longer in the present time step."""
        return max(self.written_ns, self.changed_ns) < now_ns - _SETTLED_NS


@dataclass(frozen=True)
class AdapterPiece:
    """Tensors that lie side by side in a file.

    Attributes:
        begin: its place in the file.
        raw: bytes.
    """

    begin: int
    raw: Tensor
    entries: list[tuple[TensorEntry, AdapterModule]]

    def tensor(self, entry: TensorEntry) -> Tensor:
        """One of its tensors, flat, in its own dtype. It shares the memory of the piece if it is aligned."""
        dtype: torch.dtype = getattr(torch, entry.dtype)
        begin = entry.begin - self.begin
        raw = self.raw[begin : begin + entry.end - entry.begin]
        return (raw.clone() if begin % dtype.itemsize else raw).view(dtype)


class AdapterFile:
    """An adapter whose names, shapes and sizes are checked, and whose tensors are read next.

    Attributes:
        modules: in the order of the model.
        stamps: the stamps of its files.
        is_settled: the stamps prove from now on that the files are unchanged.
        digest: SHA-256 over names, factors and the tensors as they are in the file. Empty until all tensors are read.
            Code that knows that the content equals an earlier reading sets it first. Then nothing is checked again.
        between_pieces: is called before each piece is read.
    """

    def __init__(
        self, file: BufferedReader[FileIO], modules: list[AdapterModule], stamps: tuple[FileStamp, FileStamp]
    ) -> None:
        self._file, self.modules, self.stamps = file, modules, stamps
        now_ns = time.time_ns()
        self.is_settled = all(stamp.is_settled(now_ns) for stamp in stamps)
        self.digest = ""
        self.between_pieces: Callable[[], None] = lambda: None

    def facts(self, dtype: torch.dtype) -> AdapterFacts:
        """The facts of an adapter that is read into tensors of `dtype`."""
        num_elements = sum(module.rank * (module.in_features + module.out_features) for module in self.modules)
        rank = max(module.rank for module in self.modules)
        return AdapterFacts(self.digest, rank, num_elements * dtype.itemsize, len(self.modules))

    def pieces(self, dtype: torch.dtype) -> Iterator[AdapterPiece]:
        """All tensors once, in the order of the file, which is the fastest order for a disk. The next overwrites a
        piece.

        Raises AdapterError: a number is NaN or infinite in `dtype`, or the file has become shorter.
        """
        pieces = list(self._cut())
        is_known = bool(self.digest)
        hashes: dict[TensorEntry, str] = {}
        memory = torch.empty(max(end - begin for begin, end, _ in pieces), dtype=torch.uint8)
        for begin, end, entries in pieces:
            self.between_pieces()
            piece = AdapterPiece(begin, memory[: end - begin], entries)
            self._file.seek(begin)
            if self._file.readinto(piece.raw.numpy().data) != end - begin:
                raise AdapterError(f"{TENSORS_NAME} changed while it was read", fix=_AGAIN)
            if not is_known:
                _check_piece(piece, dtype)
                data = piece.raw.numpy().data
                for entry, _ in entries:
                    hashes[entry] = hashlib.sha256(data[entry.begin - begin : entry.end - begin]).hexdigest()
            yield piece
        if not is_known:
            self.digest = self._digest(hashes)

    def _cut(self) -> Iterator[tuple[int, int, list[tuple[TensorEntry, AdapterModule]]]]:
        """Begin, end and tensors of the pieces."""
        places = sorted(
            ((entry, module) for module in self.modules for entry in module.entries), key=lambda place: place[0].begin
        )
        first = 0
        for i, (entry, _) in enumerate(places):
            is_last = i + 1 == len(places) or places[i + 1][0].begin != entry.end
            if is_last or places[i + 1][0].end - places[first][0].begin > ADAPTER_READ_BYTES:
                yield places[first][0].begin, entry.end, places[first : i + 1]
                first = i + 1

    def _digest(self, hashes: dict[TensorEntry, str]) -> str:
        digest = hashlib.sha256()
        for module in self.modules:
            digest.update(f"{module.name} {module.scale!r}".encode())
            for entry in module.entries:
                digest.update(f" {entry.dtype} {list(entry.shape)} {hashes[entry]}\n".encode())
        return digest.hexdigest()


@contextmanager
def open_adapter(
    folder: Path, config: ModelConfig, *, max_rank: int, target_modules: Collection[str] | None = None
) -> Iterator[AdapterFile]:
    """An adapter for a model, while its files are open.

    Args:
        config: the config of a native model.
        max_rank: the largest rank of any module.
        target_modules: the last parts of names that an adapter may change, for example `q_proj`; None: all.

    Raises:
        AdapterError: a file is missing or malformed, or changes before the end of the context; the adapter is not LoRA
            or rsLoRA; or it does not fit the model or the limits.
    """
    with _open(folder, CONFIG_NAME) as (file, config_stamp):
        raw = file.read(_MAX_CONFIG_BYTES + 1)
        if len(raw) > _MAX_CONFIG_BYTES:
            raise AdapterError(f"{CONFIG_NAME} is too large", expected=f"at most {_MAX_CONFIG_BYTES} bytes", fix=_AGAIN)
        adapter_config = parse_config(raw)
        _refuse_pickle(folder)
        with _open(folder, TENSORS_NAME) as (tensors_file, stamp):
            try:
                entries = read_open_header(tensors_file, folder / TENSORS_NAME)
            except WeightsError as error:
                raise AdapterError(
                    error.what[:_MAX_TEXT], value=error.value, expected=error.expected, fix=error.fix
                ) from None
            modules = _modules(entries, adapter_config, config)
            for module in modules:
                _check_limits(module, max_rank, target_modules)
            yield AdapterFile(tensors_file, modules, (config_stamp, stamp))


@contextmanager
def _open(folder: Path, name: str) -> Iterator[tuple[BufferedReader[FileIO], FileStamp]]:
    """A file of the adapter. Raises AdapterError if it is missing, or if it changes before the end of the context."""
    path = folder / name
    try:
        if not path.is_file():  # a pipe would block
            raise AdapterError(
                f"The adapter has no {name}", expected=f"a folder with {CONFIG_NAME} and {TENSORS_NAME}", fix=_AGAIN
            )
        with BufferedReader(FileIO(path)) as file:
            before = FileStamp.of(os.fstat(file.fileno()))
            yield file, before
            after = FileStamp.of(path.stat())
    except OSError as error:
        raise AdapterError(f"{name} cannot be read: {error.strerror}", fix=_AGAIN) from None
    if after != before:
        raise AdapterError(f"{name} changed while it was read", fix="Load the adapter again when all files are written")


def _refuse_pickle(folder: Path) -> None:
    if (folder / TENSORS_NAME).exists():
        return
    pickled = [name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()]
    if pickled:
        raise AdapterError(
            "The adapter is in a pickle format, which can run code when it is read",
            value=pickled[0],
            expected=TENSORS_NAME,
            fix=_MAKE_SAFETENSORS,
        )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of all weights that an adapter may change, in all stages of the model."""
    shapes = {EMBEDDINGS: (config.hidden_size, config.vocab_size)}
    for layer in config.layers if config.stage is None else config.stage.all_layers:
        for linear in layer.linears():
            if not linear.is_adaptable:
                continue
            whole = linear.whole()
            sizes = (num_outputs for _, num_outputs in whole.shards)
            shapes |= {name: (size, whole.in_features) for name, size in zip(whole.names, sizes, strict=True)}
    return shapes | {OUTPUT: (config.vocab_size, config.hidden_size)}


def _own_name(peft_name: str, config: ModelConfig) -> str:
    return renamed(f"{peft_name}.", config.renamed_prefixes).removesuffix(".")


def _modules(entries: list[TensorEntry], adapter: AdapterConfig, config: ModelConfig) -> list[AdapterModule]:
    """The modules in the order of the model. Every tensor has its place, both its sizes fit, and none is missing."""
    shapes = _shapes(config)
    found: dict[str, dict[str, TensorEntry]] = {}
    peft_names: dict[str, str] = {}
    for entry in entries:
        match = _NAME.fullmatch(entry.name.removeprefix(_PREFIX)) if entry.name.startswith(_PREFIX) else None
        peft_name = "" if match is None else match[1]
        name = _own_name(peft_name, config)
        is_lookup = match is not None and match[3] is not None
        if match is None or name not in shapes or is_lookup != (name == EMBEDDINGS):
            if not _is_base_weight(entry, config, shapes):
                raise _foreign(entry.name, shapes)
            continue
        letter = match[2] or match[3]
        if letter in found.setdefault(name, {}):
            raise AdapterError(f"The adapter has two tensors {letter} for {name}", fix=_AGAIN)
        found[name][letter], peft_names[name] = entry, peft_name
    if not found:
        raise AdapterError("The adapter has no tensors", expected="a lora_A and a lora_B for each module", fix=_AGAIN)
    modules = []
    for name, (num_outputs, num_inputs) in shapes.items():
        pair = found.get(name)
        if pair is None:
            continue
        rank, expected_dtypes = adapter.rank_of(peft_names[name]), " or ".join(_FLOATS)
        for letter, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            if letter not in pair:
                raise AdapterError(f"The adapter has no lora_{letter} for {name}", fix=_AGAIN)
            entry = pair[letter]
            if entry.shape != shape:
                raise _misshapen(name, letter, entry.shape, shape)
            if entry.dtype not in _FLOATS:
                raise AdapterError(
                    f"lora_{letter} of {name} is not of a floating-point type that is read",
                    value=entry.dtype,
                    expected=expected_dtypes,
                    fix="Convert the tensors to bfloat16 and save them again",
                )
        modules.append(AdapterModule(name, (pair["A"], pair["B"]), adapter.scale_of(peft_names[name])))
    return modules


def _is_base_weight(entry: TensorEntry, config: ModelConfig, shapes: dict[str, tuple[int, int]]) -> bool:
    """Whether it is the base's own matrix, which PEFT saves beside the adapter of embeddings or output. It is not read.

    Raises AdapterError if the matrix is not of the base's size.
    """
    match = _BASE.fullmatch(entry.name.removeprefix(_PREFIX))
    name = "" if match is None else _own_name(match[1], config)
    if name not in (EMBEDDINGS, OUTPUT):
        return False
    if entry.shape != shapes[OUTPUT]:
        raise _added_tokens(name, entry.shape[:1], shapes[OUTPUT][:1])
    return True


def _misshapen(name: str, letter: str, got: tuple[int, ...], expected: tuple[int, int]) -> AdapterError:
    vocabulary = {(EMBEDDINGS, "A"): 1, (OUTPUT, "B"): 0}.get((name, letter))
    if vocabulary is not None and len(got) == 2 and got[1 - vocabulary] == expected[1 - vocabulary]:
        return _added_tokens(name, got[vocabulary:][:1], expected[vocabulary:][:1])
    return AdapterError(
        f"lora_{letter} of {name} does not fit the model and the adapter's config",
        value=list(got),
        expected=f"{list(expected)}",
        fix="Load the adapter into the model that it was trained on. Its ranks follow from r and rank_pattern",
    )


def _added_tokens(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> AdapterError:
    return AdapterError(
        f"The adapter's {name} has another vocabulary than the model: tokens were added for its training",
        value=list(got),
        expected=f"{list(expected)} tokens",
        fix=MERGE,
    )


def _foreign(name: str, shapes: dict[str, tuple[int, int]]) -> AdapterError:
    endings = sorted({known.rpartition(".")[2] for known in shapes})
    kind, fix = "a module that the model does not have", "Load the adapter into the model that it was trained on"
    if _OF_EXPERTS.search(name):
        kind, fix = "a module of experts or of their router, which adapters do not change here", MERGE
    elif "lora_magnitude_vector" in name:
        kind, fix = "a DoRA tensor", MERGE
    elif name.endswith(".bias"):
        kind, fix = "a bias", MERGE
    elif ".lora_" not in name:
        kind, fix = "a whole weight (modules_to_save, or added tokens)", MERGE
    return AdapterError(
        f"The adapter has {kind}",
        value=name,
        expected=f"tensors named {_PREFIX}<module>.lora_A.weight and lora_B.weight for {', '.join(endings)}",
        fix=fix,
    )


def _check_limits(module: AdapterModule, max_rank: int, target_modules: Collection[str] | None) -> None:
    if module.rank > max_rank:
        raise AdapterError(
            f"The rank of {module.name} is above the maximum",
            value=module.rank,
            expected=f"at most {max_rank}",
            fix=f"Use a --max-lora-rank of at least {module.rank}",
        )
    if target_modules is not None and module.name.rpartition(".")[2] not in target_modules:
        raise AdapterError(
            "The adapter changes a module that --lora-target-modules leaves out",
            value=module.name,
            expected=", ".join(sorted(target_modules)),
            fix="Name it in --lora-target-modules, or leave that flag out",
        )


def _is_finite(chunk: Tensor) -> bool:
    """Whether all numbers, one or more, are finite: NaN and infinity have an exponent of ones.

    torch's isfinite takes seven times as long (benchmarks/NOTES.md).
    """
    bits: NDArray[np.unsignedinteger[Any]]
    if chunk.dtype == torch.float32:
        bits, ones = chunk.numpy().view(np.uint32), 0x7F80_0000
    else:
        bits = chunk.view(torch.int16).numpy().view(np.uint16)
        ones = 0x7F80 if chunk.dtype == torch.bfloat16 else 0x7C00
    mask = bits.dtype.type(ones)
    return bool((bits & mask).max() != mask)


def _chunks(stored: Tensor) -> Iterator[Tensor]:
    return (stored[begin : begin + _CHUNK] for begin in range(0, len(stored), _CHUNK))


def _check_piece(piece: AdapterPiece, dtype: torch.dtype) -> None:
    """Raise AdapterError if a number of a piece is NaN or infinite in `dtype`."""
    dtypes = {getattr(torch, entry.dtype) for entry, _ in piece.entries}
    # Hundreds of small tensors take longer one by one than together.
    if dtypes == {dtype} and all(map(_is_finite, _chunks(piece.raw.view(dtype)))):
        return
    for entry, module in piece.entries:
        _check_finite(piece.tensor(entry), module.name, dtype)


def _check_finite(stored: Tensor, name: str, dtype: torch.dtype) -> None:
    """Raise AdapterError if a number of this module's tensor is NaN or infinite in `dtype`."""
    for source in _chunks(stored):
        if not _is_finite(source.to(dtype)):
            is_finite = _is_finite(source)
            raise AdapterError(
                f"A tensor of {name} holds NaN or infinity" + (f" in {dtype}" if is_finite else ""),
                expected="finite numbers",
                fix="Take --lora-dtype bfloat16 or float32"
                if is_finite
                else "Take an earlier checkpoint of the training",
            )
