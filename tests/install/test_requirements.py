"""The dependencies of each extra resolve beside every torch that Quire runs on, as the package index publishes them."""

from __future__ import annotations

import pytest

from tests.examples import IS_FULL
from tests.install.resolvers import LINUX, MACOS, Resolvers

# What a resolver says when the index cannot be reached.
UNREACHABLE = ("Failed to fetch", "Could not connect", "dns error", "Network connectivity is disabled")
TRITON = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.13.0": "3.7.1"}  # by the torch that pins it
# Extras that somebody uses beside Quire. Those for development, and clients, ask for no torch.
BESIDE_TORCH = () if IS_FULL else ("transformers", "otel", "stores", "test")
# The ends of what pyproject.toml allows, and a system without Triton.
CASES = [
    ("2.11.0", LINUX, BESIDE_TORCH),
    pytest.param("2.12.0", LINUX, (), marks=pytest.mark.slow),
    ("2.13.0", LINUX, ()),
    ("2.13.0", MACOS, BESIDE_TORCH),
]


@pytest.mark.parametrize(("torch", "target", "extras"), CASES)
def test_all_extras_resolve(torch: str, target: str, extras: tuple[str, ...], resolvers: Resolvers) -> None:
    """On Linux the index has CUDA builds. Each pins its Triton."""
    resolver = resolvers.take(torch, target, extras)
    out, error = resolver.communicate()
    if resolver.returncode and any(words in error for words in UNREACHABLE):
        pytest.skip("the package index does not answer")
    assert not resolver.returncode, error
    versions = dict(line.split("==") for line in out.splitlines() if "==" in line)
    assert (versions["torch"], versions.get("triton")) == (torch, TRITON[torch] if target == LINUX else None)
