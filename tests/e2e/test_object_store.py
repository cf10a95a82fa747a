"""The demo model from servers of S3's, Google's and Azure's protocols: the answers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire.demo
from quire import LLM, SamplingParams
from tests.e2e.object_stores import SERVERS, upload

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow

OPTIONS = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 50, "device": "cpu"}
PROMPTS = ["Once upon a time", "The"]


@pytest.fixture(scope="module", params=SERVERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the model."""
    with SERVERS[request.param](tmp_path_factory.mktemp("store")) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, "QUIRE_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}.items():
            patch.setenv(name, value)
        for path in quire.demo.path("target").iterdir():
            upload(request.param, environment, "demo/target", path)
        yield f"{request.param}://models/demo/target"


def answers(**options: object) -> list[str]:
    llm = LLM(**OPTIONS | options)
    params = SamplingParams(temperature=0, max_tokens=12)
    return [each.outputs[0].text for each in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_answers_are_the_same(model: str, num_ranks: int) -> None:
    assert answers(model=model, tensor_parallel_size=num_ranks) == answers()


def test_a_copy_on_the_disk(model: str, tmp_path: Path) -> None:
    assert answers(model=model, download_dir=str(tmp_path)) == answers()
    (weights,) = tmp_path.glob("target-*/model.safetensors")
    assert weights.read_bytes() == (quire.demo.path("target") / "model.safetensors").read_bytes()
