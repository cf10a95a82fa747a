"""Values of a GGUF file's metadata, under the keys of its architecture."""

from __future__ import annotations

import array
import struct
from typing import Any

from quire.errors import ModelConfigError
from quire.hf_config.fields import Fields

_LARGE_FLOAT = 1e38  # a number below it stays in float32's range when it is rounded


class GgufMetadata:
    """The values of one architecture, with floats as shortest decimals. A list of equal numbers counts as one."""

    def __init__(self, metadata: dict[str, Any], architecture: str, path: str) -> None:
        self.architecture = architecture
        self._metadata, self._path = metadata, path

    def get(self, key: str) -> Any:
        """The value, or None. Raises ModelConfigError if layers have different values."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, array.array):
            if len(set(value)) != 1:
                raise ModelConfigError(f"Layers that differ in {key} are not in this version", value=list(value[:8]))
            value = value[0]
        return _shortest(value)

    def per_layer(self, key: str) -> list[Any] | None:
        """One value for each layer; None if the file has no such list."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        return list(value) if isinstance(value, array.array) else None

    def fields(self, **keys: str) -> Fields:
        """Values under the caller's names, for checked access."""
        return Fields({name: self.get(key) for name, key in keys.items()}, self._path)

    def refuse_windows(self, sizes: Fields) -> None:
        """Raise ModelConfigError if the file sets a window, because it does not say which layers have the window."""
        if sizes.has("sliding_window"):
            raise ModelConfigError(
                f"Sliding windows of {self.architecture} models are not read from GGUF files",
                value=sizes.get("sliding_window"),
            )


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that gives it: 1e-6 instead of 9.99999997e-07."""
    if not isinstance(value, float) or not abs(value) < _LARGE_FLOAT:
        return value
    for digits in range(1, 9):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value
