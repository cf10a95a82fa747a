"""One, two, three and four ranks give the same tokens and logprobs, to the bit, in every form of the weights.

Ranks are threads here; tests/engine/test_rank_processes.py has processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from msgspec import structs

from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.messages import AddRequest
from quire.sampling import following
from quire.sampling_params import SamplingParams
from quire.schedule import RowsFailedError
from quire.speculative_config import SpeculativeConfig
from tests.covering import covering
from tests.engine.harness import CHECKPOINT_FORMAT, EOS, Prompt, run, tokens_and_logprobs, two_layers
from tests.engine.ranks import fail_at, started
from tests.engine.test_sameness import asked_on, brief
from tests.gguf.writing import write_gguf
from tests.models.tiny_models import SIZES
from tests.quantization import checkpoints, fp8_checkpoints
from tests.quantization.checkpoints import Format, write_quantized
from tests.quantization.fp8_checkpoints import Fp8Form

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

Answer = list[tuple[list[int], list[Any]]]


def answers(core: EngineCore) -> Answer:
    """Tokens and logprobs of the brief prompts, which run together; prompt logprobs of one of them."""
    for index, prompt in enumerate(asked_on(cpu.isa())):
        params = structs.replace(prompt.params, logprobs=3, prompt_logprobs=2 if index == 1 else None)
        core.add(AddRequest(f"r{index}", list(prompt.token_ids), params, 8, stop_token_ids=[EOS]))
    return list(tokens_and_logprobs(core).values())


def of_ranks(num_ranks: int, folder: Path | None = None, **arguments: Any) -> Answer:
    engine = started(num_ranks, folder, **arguments)
    try:
        return answers(engine.core)
    finally:
        engine.core.shutdown()


FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
}


@cache
def expected(form: str, isa: str) -> Answer:
    return of_ranks(1, **FORMS[form])


@cache
def expected_of_two_layers(form: str, isa: str) -> Answer:
    return of_ranks(1, two_layers(), **FORMS[form])


@pytest.mark.parametrize(
    ("form", "num_ranks"),
    [
        *[("bfloat16", 2), ("float32", 3), ("bfloat16", 4)],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in (("float32", 2), ("bfloat16", 3), ("float32", 4))],
    ],
)
def test_floats(form: str, num_ranks: int) -> None:
    assert of_ranks(num_ranks, **FORMS[form]) == expected(form, cpu.isa())


def on_all(names: Sequence[str]) -> list[ParameterSet]:
    """Instruction sets, names and numbers of ranks. Names, and the kernels that ranks call with their rows, meet
    instruction sets in the tests of kernels. Four ranks cut as two and three do; quick tests have them in test_floats.
    """
    quick = covering(cpu.isas(), names, [2, 3], apart=[(0, 1), (0, 2)])
    return [*quick, *(pytest.param(*case, 4, marks=pytest.mark.slow) for case in product(cpu.isas(), names))]


@pytest.mark.parametrize(("isa", "form", "num_ranks"), on_all([*FORMS]))
def test_every_instruction_set(isa: str, form: str, num_ranks: int) -> None:
    """With chunks of prompts and two batches in flight."""
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        found = of_ranks(num_ranks, two_layers(), max_num_batched_tokens=17, async_scheduling=True, **FORMS[form])
        assert found == expected_of_two_layers(form, isa)
    finally:
        cpu.set_isa(best)


@cache
def of_one() -> list[list[int]]:
    """Tokens of the brief prompts from one rank, with two layers."""
    return run(started(1, two_layers()).core, brief())


def _gguf(folder: Path) -> Path:
    write_gguf(folder / "m.gguf", two_layers(), "Q4_K")
    return folder / "m.gguf"


def _quantized(form: Format) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_quantized(two_layers(), folder, form)
        return folder

    return write


def _llama(**sizes: Any) -> Any:
    import transformers

    common = {"vocab_size": 5000, "num_hidden_layers": 2, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return transformers.LlamaConfig(**common | {"num_attention_heads": 8} | sizes)


def _fp8_blocks(folder: Path) -> Path:
    """Four and five blocks of outputs, for up to four ranks."""
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 1, "head_dim": 128}
    config = _llama(hidden_size=512, intermediate_size=640, **sizes)
    fp8_checkpoints.write(folder, config, Fp8Form(scales="block"))
    return folder


def _awq(folder: Path) -> Path:
    """An intermediate size of 7 groups, which 2 and 4 ranks do not divide."""
    config = _llama(hidden_size=128, intermediate_size=7 * 64, head_dim=16)
    checkpoints.write(folder, config, Format(method="awq", group_size=64, has_zeros=True))
    return folder


def _wide_awq(folder: Path) -> Path:
    """Of an intermediate size of 231 groups, and 8 heads: vLLM refuses the one on 2 ranks, the other on 3."""
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 8}
    config = _llama(hidden_size=128, intermediate_size=29_568, head_dim=16, **sizes)
    checkpoints.write(folder, config, Format(method="awq", group_size=128, has_zeros=True))
    return folder


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "GPTQ with act-order": _quantized(CHECKPOINT_FORMAT),
    "AWQ": _awq,
    "int8 of whole rows": _quantized(Format(method="int-quantized", bits=8)),
    "pack-quantized": _quantized(Format(method="pack-quantized", group_size=32, has_zeros=True)),
    "Q4_K": _gguf,
    "FP8 blocks": _fp8_blocks,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: CHECKPOINTS[name](tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def of_one_rank(folder_of: Callable[[str], Path]) -> Callable[[str, str], Answer]:
    """By checkpoint and instruction set."""
    return cache(lambda name, isa: of_ranks(1, folder_of(name)))


@pytest.mark.parametrize(("isa", "name", "num_ranks"), on_all([*CHECKPOINTS]))
def test_quantized_checkpoints(
    isa: str,
    name: str,
    num_ranks: int,
    folder_of: Callable[[str], Path],
    of_one_rank: Callable[[str, str], Answer],
) -> None:
    """Groups, blocks and act-order are never cut: every rank has whole rows."""
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        one = of_one_rank(name, isa)
        assert len({tuple(tokens) for tokens, _ in one}) > 1
        assert of_ranks(num_ranks, folder_of(name)) == one
    finally:
        cpu.set_isa(best)


def test_sizes_that_ranks_do_not_divide(tmp_path: Path) -> None:
    folder = _wide_awq(tmp_path)
    one = of_ranks(1, folder)
    assert len({tuple(tokens) for tokens, _ in one}) > 1
    for num_ranks in (2, 3):
        assert of_ranks(num_ranks, folder) == one, num_ranks


@pytest.mark.parametrize("family", ["olmo2", "phi3", "gemma2", "qwen2"])
def test_families(family: str, tmp_path: Path) -> None:
    """A norm over all heads, fused tensors, norms behind layers with caps, and biases; sizes that fill no panel."""
    import transformers

    sizes = SIZES | {"vocab_size": 5000, "intermediate_size": 200}
    config = transformers.AutoConfig.for_model(family, **sizes).to_dict()
    config["architectures"] = [f"{family.capitalize()}ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = of_ranks(1, tmp_path, load_format="dummy", max_model_len=128)
    assert len({tuple(tokens) for tokens, _ in one}) > 1
    assert of_ranks(2, tmp_path, load_format="dummy", max_model_len=128) == one


def test_a_step_that_cannot_be_sampled_is_void_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed again: the tokens are the same as without a failure."""
    engine = started(2, two_layers())
    runner = engine.executor.workers[0].runner  # type: ignore[attr-defined]
    calls = fail_at(monkeypatch, runner.sampler, "choose", 3, OSError("no numbers today"))
    assert run(engine.core, brief()) == of_one()
    assert len(calls) > 3
    engine.core.shutdown()


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(3, 1), (2, 2)])
def test_greedy_requests_need_no_joined_logits(
    num_ranks: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that hold are among their tokens. A random request beside them brings the joined ones back."""
    monkeypatch.setattr(following, "FEWEST_OF_PARTS", 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [Prompt(prompt.token_ids * 2, greedy) for prompt in brief()[:4]]
    mixed = [*prompts[:3], brief()[1]]
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)
    engine = started(num_ranks, two_layers(), num_stages=num_stages, speculative_config=ngram)
    one = started(1, two_layers())
    models = [worker.runner.model for worker in engine.executor.workers[:num_ranks]]  # type: ignore[attr-defined]
    joined = [_noted_calls(model, "join_logits") for model in models]
    assert run(engine.core, prompts) == run(one.core, prompts)
    assert joined == [[]] * num_ranks
    assert run(engine.core, mixed, prefix="mixed") == run(one.core, mixed)
    assert all(joined)
    engine.core.shutdown()


def _noted_calls(owner: object, name: str) -> list[int]:
    """The list gets the number of each call of this method from now on."""
    method, calls = getattr(owner, name), list[int]()

    def note(*arguments: Any) -> Any:
        calls.append(len(calls))
        return method(*arguments)

    setattr(owner, name, note)
    return calls


def test_a_request_that_cannot_be_prepared_ends_alone() -> None:
    """No rank has begun the step then. The others are computed again."""
    core, wanted = started(2, two_layers()).core, of_one()
    core.add(AddRequest("vector", [5, 7, 9], SamplingParams(temperature=0.0), 8, wants_vector=True))
    assert run(core, brief(), failing="vector") == wanted
    assert run(core, brief(), prefix="again") == wanted
    core.shutdown()


@pytest.fixture(scope="module", params=[1, 2], ids=["one machine", "two machines"])
def two_ranks(request: pytest.FixtureRequest) -> Iterator[StartedEngine]:
    engine = started(2, two_layers(), async_scheduling=True, nnodes=request.param)
    yield engine
    engine.core.shutdown()


@pytest.mark.parametrize(
    ("rank", "where", "error"),
    [
        (1, "input_batch.apply", RowsFailedError(["r0"], "only this rank cannot")),
        (0, "input_batch.apply", RowsFailedError(["r0"], "only this rank cannot")),
        (1, "model.compute_logits", MemoryError()),
        (0, "model.embed", OSError("once")),
        (1, "sampler.launch", RuntimeError("once")),
        (0, "input_batch.learn_tokens", RuntimeError("behind all that ranks do together")),
    ],
)
def test_ranks_agree_on_errors_in_a_step(
    rank: int, where: str, error: Exception, two_ranks: StartedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are known to be guilty end; a step is computed again otherwise. The engine goes on."""
    engine, expected = two_ranks, of_one()
    engine.core.scheduler.reset_prefix_cache()
    *path, name = where.split(".")
    owner = engine.executor.workers[rank].runner  # type: ignore[attr-defined]
    for each in path:
        owner = getattr(owner, each)
    fail_at(monkeypatch, owner, name, 3, error)
    found: dict[str, list[int | None]] = {}
    for index, prompt in enumerate(brief()):
        engine.core.add(AddRequest(f"r{index}", list(prompt.token_ids), prompt.params, 8, stop_token_ids=[EOS]))
    while engine.core.has_work():
        for delta in engine.core.step():
            found.setdefault(delta.request_id, []).extend([None] if delta.error else delta.token_ids)
    failed = [name for name, tokens in found.items() if tokens[-1] is None]
    assert len(failed) == isinstance(error, (RowsFailedError, MemoryError)), found
    for index, tokens in enumerate(expected):
        assert f"r{index}" in failed or found[f"r{index}"] == tokens
    monkeypatch.undo()
    assert run(engine.core, brief(), prefix="again") == expected


def test_a_row_that_fails_is_known_to_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are not numbers end one request; the others have the tokens that they have without it."""
    engine, expected = started(2, two_layers()), of_one()
    model = engine.executor.workers[0].runner.model  # type: ignore[attr-defined]
    logits, calls = model.compute_logits, []

    def spoil(*arguments: Any) -> torch.Tensor:
        found = logits(*arguments)
        calls.append(len(found))
        if len(calls) == 6:
            found[0] = torch.nan
        return found

    monkeypatch.setattr(model, "compute_logits", spoil)
    found = run(engine.core, brief(), failing="r0")
    assert found[1:] == expected[1:]
    assert found[0] == expected[0][: len(found[0])]
    assert len(found[0]) < len(expected[0])
    engine.core.shutdown()


def test_what_cannot_be_shared_is_refused_before_weights_are_read() -> None:
    with pytest.raises(ConfigError, match="it has 4 heads") as error:
        started(5, load_format="safetensors")
    assert "one of 1, 2, 3, 4" in error.value.message
    for arguments, words in (
        ({"distributed_executor_backend": "uni"}, "uni"),
        ({"tensor_parallel_size": 65}, "1 to 64"),
    ):
        with pytest.raises(ConfigError, match=words):
            started(2, **arguments)
