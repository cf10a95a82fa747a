"""Values of a GGUF file's metadata, under the keys of its architecture."""

from __future__ import annotations

import array
import struct
from typing import Any

from quire.errors import ModelConfigError
from quire.hf_config.fields import Fields

_LARGE_FLOAT = 1e38  # below it, whatever a number is rounded to is a float32


class GgufMetadata:
    """The values of one architecture: one number where the file may have one for each layer, in shortest decimals."""

    def __init__(self, metadata: dict[str, Any], architecture: str, path: str) -> None:
        self.architecture = architecture
        self._metadata, self._path = metadata, path

    def get(self, key: str) -> Any:
        """None if it is absent. Raises ModelConfigError for layers that differ."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, array.array):
            if len(set(value)) != 1:
                raise ModelConfigError(f"Layers that differ in {key} are not in this version", value=list(value[:8]))
            value = value[0]
        return _shortest(value)

    def per_layer(self, key: str) -> list[Any] | None:
        """One for each layer; None where the file has no such list."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        return list(value) if isinstance(value, array.array) else None

    def fields(self, **keys: str) -> Fields:
        """Values under names of their own, for checked access."""
        return Fields({name: self.get(key) for name, key in keys.items()}, self._path)

    def refuse_windows(self, sizes: Fields) -> None:
        """Raises ModelConfigError where the file sets a window: which layers have it is not known."""
        if sizes.has("sliding_window"):
            raise ModelConfigError(
                f"Sliding windows of {self.architecture} models are not read from GGUF files",
                value=sizes.get("sliding_window"),
            )


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that means it: 1e-6, where the file could only hold 9.99999997e-07."""
    if not isinstance(value, float) or not abs(value) < _LARGE_FLOAT:
        return value
    for digits in range(1, 9):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value
