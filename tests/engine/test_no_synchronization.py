"""A step on a GPU never reads its results on the host: the path runs on tensors without numbers (device meta).

Whatever would wait for the device fails there: .item(), .tolist(), .cpu(), a look at a condition, an index of booleans.
And every operation is watched for tensors that were left on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quire.demo
from quire.formats.kv_format import kv_format
from quire.formats.kv_groups import kv_groups
from quire.kernels import fp8, gpu
from quire.kernels.triton import kernels as triton_kernels
from quire.loader.drafter import load_drafter_config
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import Decoder
from quire.models.head import Head
from quire.models.registry import CausalLM
from quire.sampling_params import SamplingParams
from quire.schedule import UNDRAFTED, NewRow, ScheduledBatch
from quire.speculative_config import SpeculativeConfig
from quire.worker import kv_cache
from quire.worker.cuda_graphs import StepGraphs
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.draft_draws import DraftDraws
from quire.worker.draft_model import DraftModel
from quire.worker.drafter import Drafter
from quire.worker.head_drafter import HeadDrafter
from quire.worker.input_batch import Padding
from quire.worker.kv_cache import PagedCache
from quire.worker.model_runner import ModelRunner
from quire.worker.target_streams import TargetStreams
from tests.engine import heads
from tests.loading import load_model
from tests.worker.fake_accelerator import FakeAccelerator

META = torch.device("meta")
BLOCK_SIZE = 16


class Watch(TorchDispatchMode):
    """Fails on an operation with tensors of the device and of the host. Numbers (tensors without dimensions) may be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if x.device.type == "meta" or x.dim() > 0}
        assert len(devices) < 2, f"{func} of tensors on host and device"
        return func(*args, **(kwargs or {}))


class MetaAccelerator(FakeAccelerator):
    """Its memory has no numbers; downloads bring zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.device = META
        self.num_downloads = 0

    def upload(self, host: Tensor, target: Tensor) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def download(self, tensors: Sequence[Tensor]) -> Any:
        assert all(tensor.device == META for tensor in tensors)
        self.num_downloads += 1

        def wait() -> Iterator[Tensor]:
            return iter([torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors])

        return SimpleNamespace(wait=wait)


class MetaKernels:
    """The GPU kernels' names; their arguments must be on the device."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.device == META, "rows on the host"
        return x.to(torch.float8_e4m3fn), x.new_empty((len(x), 1), dtype=torch.float32)

    def rms_norm_to_fp8(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.called.add("rms_norm_to_fp8")
        return self.quantize_rows(x)

    def gated_activation_to_fp8(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        self.called.add("gated_activation_to_fp8")
        return self.quantize_rows(x[:, : x.shape[1] // 2])

    def __getattr__(self, name: str) -> Callable[..., None]:
        assert name in triton_kernels.__all__

        def kernel(*arguments: Any, **named: Any) -> None:
            self.called.add(name)
            given = (x for x in (*arguments, *named.values()) if isinstance(x, Tensor))
            assert all(x.device == META for x in given), f"{name} of tensors on the host"

        return kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> MetaKernels:
    found = MetaKernels()
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == "meta")
    monkeypatch.setattr(gpu, "kernels", lambda: found)
    monkeypatch.setattr(gpu, "place", lambda x, device: torch.empty_like(x, device=device))
    return found


@cache
def demo_on_meta(quantization: str | None) -> tuple[ModelConfig, CausalLM]:
    """Loaded with the kernels in place."""
    config = load_model_config(quire.demo.path("target"))
    return config, load_model(config, torch.bfloat16, quantization=quantization, device="meta")


@pytest.fixture(params=[(None, "auto")], ids=str)
def runner(kernels: MetaKernels, request: pytest.FixtureRequest) -> ModelRunner:
    """Of the demo model; the parameter is its quantization and the KV cache's dtype."""
    quantization, cache_dtype = request.param
    config, model = demo_on_meta(quantization)
    assert isinstance(model, Decoder)
    model.keep_streams((), torch.empty(0))  # one with a head may have been before
    accelerator = MetaAccelerator()
    dtype = getattr(torch, kv_format(cache_dtype, "bfloat16").torch_dtype)
    cache = kv_cache.allocate(kv_groups(config), 32, BLOCK_SIZE, dtype, META)
    inputs = DeviceInputBatch(
        8, 256, BLOCK_SIZE, config.vocab_size, max_tokens=256, accelerator=accelerator, steps_in_flight=2
    )
    with Watch():
        graphs = StepGraphs(model, cache.layers, inputs, accelerator, [Padding(n, n) for n in (8, 2, 1)])
        graphs.capture()
    return ModelRunner(model, cache, inputs, "raw_logprobs", accelerator, graphs)


@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_a_step_that_drafts_waits_once(runner: ModelRunner, kind: str, tmp_path: Path) -> None:
    """With the model as its own draft model, or with a head. Only a step that drafts waits for its drafts."""
    inputs, device = runner.input_batch, runner.device
    assert isinstance(device, MetaAccelerator)
    caches = PagedCache(runner.cache.pages, runner.cache.layers, runner.cache.layers)
    draws = DraftDraws(inputs, device, is_greedy=False)
    if kind == "draft_model":
        drafter: Drafter = DraftModel(runner.model, caches, inputs, draws, max_tokens=256, max_drafts=3)
    else:
        heads.write(tmp_path, heads.SPECULATORS, heads.eagle3_tensors(prefix="layers.0.", is_whole=True))
        config = load_drafter_config(tmp_path, SpeculativeConfig(method="eagle3", model="x"), runner.model.config)
        head = load_model(config, torch.bfloat16, device="meta", target=runner.model)
        assert isinstance(head, Head)
        assert isinstance(runner.model, Decoder)
        streams = TargetStreams(runner.model, head.head.streams, 256)
        drafter = HeadDrafter(head, streams, caches, inputs, draws, max_tokens=256, num_kept=8, runs_ahead=True)
    graphs = runner.forward_pass.captured
    runner = ModelRunner(runner.model, runner.cache, inputs, "raw_logprobs", device, graphs, drafter)
    names = ["greedy", "random"]
    rows = [NewRow(name, list(range(20)), 20, EVERYTHING[name], [2 * i, 2 * i + 1]) for i, name in enumerate(names)]
    for step, (start, length, drafts) in enumerate([(0, 20, ()), (20, 4, (UNDRAFTED,) * 3)]):
        batch = ScheduledBatch(step, names, [start] * 2, [length] * 2, [len(drafts) + 1] * 2, [drafts] * 2)
        batch.new_block_ids = [[] for _ in names]
        batch.new_rows = rows if step == 0 else []
        before = device.num_downloads
        with Watch():
            result = runner.submit(batch).result()
        assert not result.errors
        assert device.num_downloads - before == (1 if step == 0 else 2), "drafts, and the tokens of the step"
        assert [len(token_ids) for token_ids in result.token_ids] == [1 + len(drafts)] * 2, "all are zeros"


WORDS = SamplingParams(temperature=0.0)
WORDS.bad_words_token_ids = [[1, 2], [3]]
EVERYTHING = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=1),
    "penalties": SamplingParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=1.1),
    "bad words": WORDS,
    "min tokens": SamplingParams(temperature=0.0, min_tokens=5),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 1.0}, allowed_token_ids=[5, 6, 7]),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
    "logprobs of tokens": SamplingParams(temperature=0.0, logprob_token_ids=[7, 9]),
}


@pytest.mark.parametrize("names", [["greedy"], ["random"], ["greedy", "random"], list(EVERYTHING)], ids=str)
def test_steps(runner: ModelRunner, kernels: MetaKernels, names: list[str]) -> None:
    """A prompt in two pieces, then tokens one by one, two steps in flight."""
    rows = [
        NewRow(name, list(range(20)), 20, EVERYTHING[name], [2 * i, 2 * i + 1], frozenset([2]))
        for i, name in enumerate(names)
    ]
    pending = []
    for step, (start, length) in enumerate([(0, 13), (13, 7), *((20 + i, 1) for i in range(5))]):
        batch = ScheduledBatch(step, names, [start] * len(names), [length] * len(names))
        batch.num_logits = [int(step > 0)] * len(names)
        batch.new_block_ids = [[] for _ in names]
        batch.new_rows = rows if step == 0 else []
        batch.block_copies = [(30, 31)] if step == 0 else []
        with Watch():
            pending.append(runner.submit(batch))
        if len(pending) > 1:
            result = pending.pop(0).result()
            assert not result.errors
            assert all(len(tokens) == (result.step_id > 0) for tokens in result.token_ids)
    assert sum(graph.num_replays for graph in runner.device.graphs) == 5  # type: ignore[attr-defined]
    wanted = {"norm", "gated_activation", "rope_and_cache", "paged_attention"}
    assert kernels.called == wanted | ({"sample"} if "random" in names else {"greedy"})


@pytest.mark.parametrize(
    ("runner", "product"),
    [(("int8", "fp8"), "grouped_linear"), (("int4", "int8"), "grouped_linear"), (("fp8", "fp8_e5m2"), "fp8_linear")],
    indirect=["runner"],
    ids=str,
)
def test_steps_of_quantized_models(runner: ModelRunner, kernels: MetaKernels, product: str) -> None:
    """Weights and cache in codes: captured and launched as the others."""
    row = NewRow("row", list(range(20)), 20, EVERYTHING["greedy"], [0, 1], frozenset([2]))
    for step, (start, length) in enumerate([(0, 13), (13, 7), (20, 1), (21, 1)]):
        with Watch():
            batch = ScheduledBatch(step, ["row"], [start], [length], [int(step > 0)], new_block_ids=[[]])
            batch.new_rows = [row] if step == 0 else []
            assert not runner.submit(batch).result().errors
    assert sum(graph.num_replays for graph in runner.device.graphs) == 2  # type: ignore[attr-defined]
    assert product in kernels.called


@pytest.mark.parametrize("runner", [("fp8", "auto")], indirect=True, ids=str)
def test_steps_of_many_rows_of_an_fp8_model(
    runner: ModelRunner, kernels: MetaKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and activations give FP8, which products of FP8 take."""
    monkeypatch.setattr(fp8, "_FEWEST_QUANTIZED_ROWS", 16)
    monkeypatch.setattr(fp8, "_multiplies_fp8", lambda device: device == META)
    row = NewRow("row", list(range(30)), 30, EVERYTHING["greedy"], [0, 1], frozenset([2]))
    with Watch():
        batch = ScheduledBatch(0, ["row"], [0], [30], [1], new_block_ids=[[]], new_rows=[row])
        assert not runner.submit(batch).result().errors
    assert {"rms_norm_to_fp8", "gated_activation_to_fp8"} <= kernels.called


def test_the_watch_sees_what_it_should(runner: ModelRunner) -> None:
    on_device = torch.zeros(3, device=META)
    with Watch(), pytest.raises(AssertionError, match="tensors on host and device"):
        on_device + torch.zeros(3)
    for look in (Tensor.item, Tensor.tolist, Tensor.cpu, bool, Tensor.nonzero, lambda x: x[x > 0]):
        with pytest.raises(RuntimeError):
            look(on_device[:1])
