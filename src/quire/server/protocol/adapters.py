"""The bodies of the routes that load and unload adapters, as in vLLM."""

from __future__ import annotations

import msgspec


class LoadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter. The name decides."""

    lora_name: str = ""
    lora_int_id: int | None = None
