"""The dependencies of each extra resolve beside every torch that Quire runs on, as the package index publishes them."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement

from tests.install.resolvers import LINUX, MACOS, PROJECT, Resolvers

# The messages of a resolver when the index cannot be reached.
UNREACHABLE = ("Failed to fetch", "Could not connect", "dns error", "Network connectivity is disabled")
TRITON = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.13.0": "3.7.1"}  # by the torch that pins it
# The index needs many seconds to choose, so `make test` asks only for the newest torch.
CASES = [
    ("2.13.0", LINUX),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("2.11.0", LINUX), ("2.12.0", LINUX), ("2.13.0", MACOS))
    ),
]


@pytest.mark.parametrize(("torch", "triton"), TRITON.items())
def test_the_triton_that_a_torch_pins_is_allowed(torch: str, triton: str) -> None:
    """Also for the oldest and the newest torch, and without Triton on platforms that have no wheels of it."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    (torches,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    (tritons,) = (each for each in map(Requirement, project["optional-dependencies"]["test"]) if each.name == "triton")
    assert torches.specifier.contains(torch)
    assert tritons.specifier.contains(triton)
    assert tritons.marker is not None
    assert [tritons.marker.evaluate({"platform_system": system}) for system in ("Linux", "Darwin")] == [True, False]


@pytest.mark.parametrize(("torch", "target"), CASES)
def test_all_extras_resolve(torch: str, target: str, resolvers: Resolvers) -> None:
    """On Linux the index has CUDA builds. Each pins its Triton."""
    resolver = resolvers.take(torch, target)
    out, error = resolver.communicate()
    if resolver.returncode and any(words in error for words in UNREACHABLE):
        pytest.skip("the package index does not answer")
    assert not resolver.returncode, error
    versions = dict(line.split("==") for line in out.splitlines() if "==" in line)
    assert (versions["torch"], versions.get("triton")) == (torch, TRITON[torch] if target == LINUX else None)
