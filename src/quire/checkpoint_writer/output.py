"""The folder of a new checkpoint: finished shards stay, and only a complete folder looks like a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.errors import ConfigError
from quire.loader.safetensors import Checkpoint, open_checkpoint
from quire.loader.safetensors_headers import INDEX_NAME, read_header
from quire.loader.safetensors_writer import PARTIAL, write_tensors, write_whole

STATE_NAME = "quantize-state.json"
CONFIG_NAME = "config.json"
# A quantized model has these files of the original too, but not the index of the original's weights.
_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_COPIED_NAMES = ("LICENSE", "NOTICE")
_NOT_COPIED = (CONFIG_NAME, STATE_NAME)
_INDEX_SUFFIX = ".index.json"


class Output:
    """One folder. It holds `num_shards` weight files when it is complete.

    Before that, it holds the residual stream of the calibration text, and `quantize-state.json` with the settings and
    the progress. Files get their names when they are whole; the index and config.json come last.
    """

    def __init__(self, folder: Path, num_shards: int, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.settings = dict(settings)
        self._num_shards = num_shards

    def num_finished(self) -> int:
        """The number of shards that an interrupted run has finished.

        Raises ConfigError if the folder holds anything else.
        """
        state_path = self.folder / STATE_NAME
        if (self.folder / CONFIG_NAME).exists() or (not state_path.exists() and self._is_in_use()):
            raise ConfigError(
                "The output exists already",
                value=str(self.folder),
                expected="a folder that does not exist, is empty, or holds an interrupted run",
                param="out",
            )
        if not state_path.exists():
            return 0
        state = json.loads(state_path.read_text(encoding="utf-8"))
        found = state["settings"]
        differences = {
            name: [found.get(name), self.settings.get(name)]
            for name in found.keys() | self.settings.keys()
            if found.get(name) != self.settings.get(name)
        }
        if differences:
            raise ConfigError(
                "The output holds an interrupted run with other settings",
                value=differences,
                fix=f"Give the same settings, or remove {self.folder}",
                param="out",
            )
        return int(state["num_finished"])

    def begin(self) -> None:
        """Make the folder, with a state file that says that it is unfinished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_state(0)

    def finish_shard(self, index: int, tensors: Mapping[str, Tensor], residuals: list[Tensor]) -> None:
        """Write shard `index` and the residual stream after it. A later run continues there."""
        write_tensors(self._shard(index), tensors)
        if residuals:
            write_tensors(self._residuals(index + 1), {str(i): residual for i, residual in enumerate(residuals)})
        self._write_state(index + 1)
        self._residuals(index).unlink(missing_ok=True)

    def residuals(self, num_finished: int) -> list[Tensor]:
        """The residual stream after this number of shards."""
        path = self._residuals(num_finished)
        stored = {name: tensor.clone() for name, tensor in Checkpoint(self.folder, {path: read_header(path)}).tensors()}
        return [stored[str(i)] for i in range(len(stored))]

    def complete(self, source: Path, config: Mapping[str, Any]) -> None:
        """Copy the model's other files, then write the index and config.json, which make the folder a model."""
        for path in sorted(source.iterdir()):
            is_wanted = path.suffix in _COPIED_SUFFIXES or path.name in _COPIED_NAMES
            is_replaced = path.name in _NOT_COPIED or path.name.endswith(_INDEX_SUFFIX)
            if path.is_file() and is_wanted and not is_replaced:
                shutil.copyfile(path, self.folder / path.name)
        shards = [self._shard(index) for index in range(self._num_shards)]
        entries = {path: read_header(path) for path in shards}
        weight_map = {entry.name: path.name for path in shards for entry in entries[path]}
        total = sum(entry.end - entry.begin for found in entries.values() for entry in found)
        self._write_json(INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for path in self.folder.glob("residuals-*"):
            path.unlink()
        self._write_json(CONFIG_NAME, config)
        (self.folder / STATE_NAME).unlink()

    def _is_in_use(self) -> bool:
        if not self.folder.is_dir():
            return self.folder.exists()
        return any(path.suffix != PARTIAL for path in self.folder.iterdir())

    def num_bytes(self) -> int:
        """The bytes of all weights together."""
        return open_checkpoint(self.folder).num_bytes

    def _write_state(self, num_finished: int) -> None:
        self._write_json(STATE_NAME, {"settings": self.settings, "num_finished": num_finished})

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        encoded = json.dumps(value, indent=2).encode() + b"\n"
        write_whole(self.folder / name, lambda file: file.write(encoded))

    def _shard(self, index: int) -> Path:
        return self.folder / f"model-{index + 1:05}-of-{self._num_shards:05}.safetensors"

    def _residuals(self, num_finished: int) -> Path:
        return self.folder / f"residuals-{num_finished:05}.tmp"
