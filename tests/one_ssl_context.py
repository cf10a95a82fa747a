"""Clients of httpx share one SSL context: each would read the certificates of all authorities anew."""

from __future__ import annotations

from functools import cache
from ssl import SSLContext
from typing import Any

from httpx._transports import default

_create: Any = default.create_ssl_context
_of_all_authorities = cache(_create)


def _create_or_share(verify: SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True) -> SSLContext:
    is_shared = verify is True and cert is None
    return _of_all_authorities(trust_env=trust_env) if is_shared else _create(verify, cert, trust_env)


def share() -> None:
    """From now on."""
    default.create_ssl_context = _create_or_share
