"""`quire quality`: its numbers against transformers' logits and dense definitions, and the output of the command."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quire.demo
from quire.cli.main import main
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.quality import measure
from quire.quality.divergence import Positions, compare
from quire.quality.summary import summarize

CONTEXT = 40
CHATS = """<|im_start|>user
What does os.path.join do?<|im_end|>
<|im_start|>assistant
`os.path.join(a, *p)`: Join two or more pathname components, inserting '/' as needed.<|im_end|>
<|im_start|>user
Which module provides heapq.heappush?<|im_end|>
<|im_start|>assistant
`heapq.heappush` is provided by the `heapq` module.<|im_end|>
Some other words, which the model has never seen in this order, so that its predictions are spread over the vocabulary.
"""


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(CHATS)
    return path


@pytest.fixture
def perturbed(tmp_path: Path) -> Path:
    """The demo model with noise on its weights."""
    folder = tmp_path / "perturbed"
    shutil.copytree(quire.demo.path(), folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * 0.06
            weights[name] = (weight.float() + noise).to(weight.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main(["quality", *map(str, words), "--json", "--disable-tqdm", "--num-threads", "1"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def dense_logprobs(folder: Path, windows: list[list[int]]) -> list[Tensor]:
    """log p of every token at every position, from transformers, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([window])).logits[0, :-1].double().log_softmax(-1) for window in windows]


def test_numbers_are_those_of_transformers(
    text_file: Path, perturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    token_ids = Tokenizer.from_file(str(quire.demo.path() / "tokenizer.json")).encode(CHATS).ids
    windows = [token_ids[i : i + CONTEXT] for i in range(0, len(token_ids), CONTEXT)]
    base = dense_logprobs(quire.demo.path(), windows)
    other = dense_logprobs(perturbed, windows)
    targets = [torch.tensor(window[1:])[:, None] for window in windows]
    nll = [torch.cat([-p.gather(1, t)[:, 0] for p, t in zip(ps, targets, strict=True)]) for ps in (base, other)]
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(base, other, strict=True)])
    agreement = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(base, other, strict=True)]).double().mean()

    found = run(capsys, perturbed, "--against", quire.demo.path(), "--text", text_file, "--context", str(CONTEXT),
                "--dtype", "float32")  # fmt: skip
    (row,) = found["rows"]
    assert row["num_tokens"] == len(token_ids) - len(windows)
    assert row["num_windows"] == len(windows) > 2
    assert row["base_perplexity"]["value"] == pytest.approx(nll[0].mean().exp().item(), rel=1e-4)
    assert row["perplexity"]["value"] == pytest.approx(nll[1].mean().exp().item(), rel=1e-4)
    assert row["perplexity_ratio"]["value"] == pytest.approx((nll[1] - nll[0]).mean().exp().item(), rel=1e-4)
    assert row["kl_mean"]["value"] == pytest.approx(kl.mean().item(), rel=1e-3)
    assert row["kl_mean"]["value"] > 0.01, "the noise is too small to tell"
    assert row["kl_p99"] == pytest.approx(torch.quantile(kl, 0.99).item(), rel=1e-3)
    assert row["top_token_agreement"]["value"] == pytest.approx(agreement.item(), abs=1e-9)


def test_a_row_for_each_format(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--text", text_file, "-q", "none,int8", "--quantization", "int4", "--context", "64")
    assert [row["name"] for row in found["rows"]] == ["unquantized", "int8", "int4"]
    same, int8, int4 = found["rows"]
    assert same["kl_mean"]["value"] == 0.0
    assert same["perplexity_ratio"] == {"value": 1.0, "interval": [1.0, 1.0]}
    assert same["top_token_agreement"]["value"] == 1.0
    assert 0 < int8["kl_mean"]["value"] < int4["kl_mean"]["value"]
    assert same["weight_bytes"] > int8["weight_bytes"] > int4["weight_bytes"]


def test_one_model_at_a_time_beside_the_base(
    text_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    load = measure.load

    def watched(*arguments: Any) -> measure.Loaded:
        in_memory = [reference for reference in loaded if reference() is not None]
        assert len(in_memory) <= 2, "more than the base is in memory while the next model is loaded"
        worker = load(*arguments)
        loaded.extend((weakref.ref(worker.runner), weakref.ref(worker.runner.model)))
        return worker

    monkeypatch.setattr(measure, "load", watched)
    run(capsys, "--text", text_file, "-q", "int8,int4,fp8", "--context", "64", "--max-tokens", "64")
    assert len(loaded) == 8


def test_a_window_of_nothing_but_the_prefix(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_prefix", lambda tokenizer: [1, 2])
    with pytest.raises(ConfigError, match="no room for text") as caught:
        measure.read_text(str(text_file), EngineConfig(), [], 2, 100)
    assert caught.value.param == "context"
    assert measure.read_text(str(text_file), EngineConfig(), [], 3, 2).num_tokens == 6


def test_what_it_prints(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quality", "--text", str(text_file), "-q", "int8", "--max-tokens", "100", "--context", "50"]
    assert main([*words, "--num-threads", "1"]) == 0
    shown = capsys.readouterr()
    assert "100 tokens in 2 windows of up to 50, 98 of them predicted" in shown.out
    assert "int8" in shown.out
    assert "tok/s" not in shown.err, "a bar where there is no terminal"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "compared with itself"),
        (("-q", "none"), "compared with itself"),
        (("-q", "int8", "--context", "1"), "Too few tokens"),
        (("-q", "int8", "--max-tokens", "1"), "Too few tokens"),
        (("-q", "int9"), "int9"),
    ],
)
def test_what_it_refuses(
    text_file: Path, words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", "--text", str(text_file), *words]) == 2
    assert part in capsys.readouterr().err


def test_files_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "empty"
    empty.write_text("")
    for path, part in ((binary, "cannot be read"), (tmp_path / "none", "cannot be read"), (empty, "too short")):
        assert main(["quality", "--text", str(path), "-q", "int8"]) == 2
        assert part in capsys.readouterr().err


def test_other_tokens_are_not_compared(text_file: Path, perturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = json.loads((perturbed / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = None
    (perturbed / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["quality", str(perturbed), "--text", str(text_file), "--against", str(quire.demo.path())]) == 2
    assert "different tokenizers" in capsys.readouterr().err


def test_divergence_of_nearly_equal_models_is_not_rounding() -> None:
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(1)) * 4
    delta = 1e-4 * torch.randn(20, 5000, generator=torch.Generator().manual_seed(2))
    found = compare(logits, logits + delta, torch.zeros(20, dtype=torch.long))
    p = logits.double().softmax(-1)
    d = (logits + delta).double() - logits.double()
    second_order = ((p * d**2).sum(-1) - (p * d).sum(-1) ** 2) / 2  # KL of a small change of logits
    torch.testing.assert_close(found.kl, second_order, rtol=1e-3, atol=0)


def test_intervals_hold_as_often_as_they_say() -> None:
    """95 % intervals of windows whose positions are alike contain the mean in about 95 of 100 trials."""
    generator = torch.Generator().manual_seed(3)
    hits = 0
    for _ in range(400):
        windows = []
        for length in (30, 30, 30, 30, 30, 10):
            kl = torch.randn(1, generator=generator).double() + 0.1 * torch.randn(length, generator=generator).double()
            windows.append(Positions(kl * 0, kl, kl, kl * 0))
        estimate = summarize(windows)
        assert estimate.kl_mean.interval is not None
        hits += estimate.kl_mean.interval[0] <= 0 <= estimate.kl_mean.interval[1]
        assert estimate.perplexity_ratio.interval is not None
        assert math.log(estimate.perplexity_ratio.value) == pytest.approx(estimate.kl_mean.value)
    assert 0.91 <= hits / 400 <= 0.98, hits / 400


def test_one_window_has_no_interval() -> None:
    part = torch.ones(5, dtype=torch.float64)
    found = summarize([Positions(part, part, part, part)])
    assert found.kl_mean.interval is None
    assert found.perplexity.value == pytest.approx(math.e)


def test_a_long_text() -> None:
    """torch.quantile takes 2**24 values at most."""
    part, one = torch.zeros(2**24 + 1, dtype=torch.float32), torch.zeros(1)
    assert summarize([Positions(one, one, part, one)]).kl_p99 == 0.0
