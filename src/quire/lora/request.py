"""An adapter as callers name it (vLLM's LoRARequest), and as the front end knows it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.lora.modules import check_name


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for requests, read when it is first named.

    Attributes:
        lora_name: its name among the adapters of an engine.
        lora_int_id: a number of the caller's choice, from 1 on.
        lora_path: its folder.
        base_model_name: the model that it was made for.
        load_inplace: read it again, also if the name is known.
        is_3d_lora_weight: refused, because mixtures of experts have no adapters here.

    Raises InvalidRequestError.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        check_name(self.lora_name, "lora_name")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidRequestError(
                "Illegal lora_int_id", value=self.lora_int_id, expected="a number from 1 on", param="lora_int_id"
            )
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise InvalidRequestError(
                "An adapter needs its folder", value=self.lora_path, expected="a path", param="lora_path"
            )
        if self.is_3d_lora_weight:
            raise UnsupportedFieldError(
                "Adapters of experts are not read", fix="Leave is_3d_lora_weight out", param="is_3d_lora_weight"
            )

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class Registration:
    """One version of an adapter under a name. Requests keep the version that they found."""

    name: str
    path: str
    digest: str
    lora_int_id: int
    base_model_name: str | None = None

    def as_request(self) -> LoRARequest:
        """The adapter as callers in Python find it in their outputs."""
        return LoRARequest(self.name, self.lora_int_id, self.path, self.base_model_name)
