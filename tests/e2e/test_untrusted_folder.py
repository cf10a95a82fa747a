"""A model's folder full of code: none of it runs, whatever names it. Each piece would leave a file behind."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

import quire.demo
from quire import LLM, SamplingParams
from quire.errors import ConfigError, QuireError
from quire.frontend.tokenizer import Tokenizer

OPTIONS = {"kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
CLASSES = (
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "AutoProcessor",
    "AutoImageProcessor",
    "AutoFeatureExtractor",
)


class _Pickled:
    """Runs when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.canary,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model, with every way to name code that Hugging Face's files have."""
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(quire.demo.path(), folder)
    for name in ("evil", "modeling_evil", "tokenization_evil", "conftest", "sitecustomize", "__init__"):
        (folder / f"{name}.py").write_text(
            f"from pathlib import Path\nPath({str(canary)!r}).touch()\nclass Evil: pass\n"
        )
    remote = {"auto_map": dict.fromkeys(CLASSES, "evil.Evil"), "custom_generate": "evil.py", "trust_remote_code": True}
    files = {
        "config.json": remote | {"custom_pipelines": {"text-generation": {"impl": "evil.Evil"}}},
        "tokenizer_config.json": remote | {"tokenizer_class": "Evil", "processor_class": "Evil"},
        "generation_config.json": remote,
        "processor_config.json": remote | {"processor_class": "Evil"},
        "preprocessor_config.json": remote,
    }
    for name, fields in files.items():
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | fields))
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(_Pickled(canary)))
    return folder


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_it_runs_without_the_code(model_impl: str, folder: Path) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    llm = LLM(str(folder), model_impl=model_impl, **OPTIONS)
    (answer,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert answer.outputs[0].text.startswith("`os.path.join(")
    assert not (folder.parent / "canary").exists()


@pytest.mark.parametrize("has_tokenizer_json", [True, False])
def test_a_tokenizer_of_its_own_is_refused(has_tokenizer_json: bool, folder: Path) -> None:
    """Converting goes through transformers, which could import the class."""
    if not has_tokenizer_json:
        (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ConfigError, match="could not be converted"):
        Tokenizer.from_folder(folder, "slow")
    assert not (folder.parent / "canary").exists()


def test_pickles_alone_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(QuireError, match=r"pickle format.*save_pretrained"):
        LLM(str(folder), **OPTIONS)
    assert not (folder.parent / "canary").exists()


def test_the_canary_would_sing(folder: Path) -> None:
    """The fixture's pieces do run if they are allowed to."""
    canary = folder.parent / "canary"
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert canary.exists()
    canary.unlink()
    exec((folder / "evil.py").read_text())
    assert canary.exists()
