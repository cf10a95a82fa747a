"""The demo model from another implementation of S3, moto's server: the same answers as from its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire.demo
from quire import LLM, SamplingParams

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.slow

OPTIONS = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 50, "device": "cpu"}
PROMPTS = ["Once upon a time", "The"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the model."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_REGION": "us-east-1",
            "QUIRE_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            import boto3

            boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"]).create_bucket(Bucket="models")
            store = obstore.store.from_url("s3://models/demo/target", client_options={"allow_http": True})
            for path in quire.demo.path("target").iterdir():
                obstore.put(store, path.name, path)
            yield "s3://models/demo/target"
    finally:
        server.stop()


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
