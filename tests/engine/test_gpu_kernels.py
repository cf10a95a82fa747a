"""The engine's path for GPUs with the kernels of a GPU, under Triton's interpreter: the tokens are the CPU engine's.

float32, because the interpreter cuts off where a GPU rounds. Without a GPU only: with one, test_on_a_gpu.py runs them.
"""

from __future__ import annotations

import pytest

from quire.kernels import cpu, gpu
from quire.sampling_params import SamplingParams
from tests import triton_interpreter
from tests.engine import harness
from tests.engine.harness import Prompt, Schedule, build_core, run
from tests.engine.test_sameness import prompts
from tests.worker.fake_accelerator import FakeAccelerator

if reason := triton_interpreter.why_not():
    pytest.skip(reason, allow_module_level=True)
# of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

PARAMS = (
    SamplingParams(temperature=0.0, min_tokens=6, max_tokens=6),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=2),
    SamplingParams(temperature=0.0, max_tokens=2),
)
LENGTHS = (9, 21, 3)


def requests() -> list[Prompt]:
    return [
        Prompt(prompt.token_ids[:length], params)
        for prompt, length, params in zip(prompts(), LENGTHS, PARAMS, strict=False)
    ]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_tokens_are_those_of_the_cpu(is_deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces beside decodes, padded graphs, a random row among greedy ones, two steps in flight."""
    from quire.kernels.triton import kernels
    from quire.kernels.triton.launch import IS_INTERPRETED

    if not IS_INTERPRETED:
        pytest.skip("there is a GPU, on which kernels are not interpreted")
    expected = run(build_core(Schedule(), "float32"), requests())
    called: set[str] = set()

    class Kernels:
        def __getattr__(self, name: str) -> object:
            called.add(name)
            return getattr(kernels, name)

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "serves", lambda device: True)
        patch.setattr(gpu, "kernels", Kernels)
        patch.setattr(gpu, "_is_deterministic", is_deterministic)
        patch.setattr(cpu, "_available", False)
        harness.demo_model.cache_clear()  # it is loaded for other kernels
        accelerator = FakeAccelerator()
        schedule = Schedule(
            chunk=16, max_num_seqs=4, num_blocks=16, depth=2, accelerator=accelerator, graph_sizes=(1, 2, 4)
        )
        try:
            assert run(build_core(schedule, "float32"), requests()) == expected
        finally:
            harness.demo_model.cache_clear()
    products = {"linear"} if is_deterministic else set()
    assert called == products | {
        *("gated_activation", "greedy", "paged_attention", "rms_norm", "rope_and_cache", "sample")
    }
    assert sum(graph.num_replays for graph in accelerator.graphs) >= 2
