"""Speculative decoding on the command line: every key, method and spelling of vLLM's, and the answer to each."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire.demo
from quire.cli.main import main
from quire.compat.foreign import Foreign
from quire.compat.speculation import OTHER_SPELLINGS, SPECULATION_KEYS, speculative_config_of
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.hf_config.drafter import method_of_checkpoint
from quire.speculative_config import FIELDS, METHODS, SpeculativeConfig, keys_of
from tests.cli.reading import read

LINES = (Path(__file__).parent / "vllm_0_32_speculation.txt").read_text().splitlines()[1:]
NAMES = {kind: names.split() for kind, names in (line.split(":") for line in LINES)}
NGRAM = {"method": "ngram"}


@pytest.mark.parametrize("key", [*NAMES["keys"], *NAMES["old keys"]])
def test_key_of_vllm_is_known(key: str) -> None:
    """It is a field, becomes one, or has an answer with the reason."""
    assert key in {*FIELDS, *SPECULATION_KEYS, *OTHER_SPELLINGS}


@pytest.mark.parametrize("entry", SPECULATION_KEYS.values(), ids=lambda entry: entry.name)
def test_key_without_a_field(entry: Foreign, caplog: pytest.LogCaptureFixture) -> None:
    assert entry.name not in FIELDS
    assert entry.text[-1] not in ".!?"
    value: Any = "17" if entry.shape == "value" else True
    with caplog.at_level(logging.WARNING):
        if entry.kind == "refused":
            with pytest.raises(ConfigError, match=f"speculative_config.{entry.name} is not supported: ") as caught:
                speculative_config_of({**NGRAM, entry.name: value})
            assert caught.value.fix
            assert caught.value.param == "speculative_config"
            return
        assert speculative_config_of({**NGRAM, entry.name: value}) == SpeculativeConfig(method="ngram")
    notices = [record.getMessage() for record in caplog.records]
    is_silent = True in entry.off
    assert notices == [f"speculative_config.{entry.name} has no effect: {entry.text}"] * (not is_silent)


@pytest.mark.parametrize("method", NAMES["methods"])
def test_method_of_vllm(method: str) -> None:
    """It drafts, or is refused with a way out."""
    given = {"method": method} | ({"model": "a/b"} if method in ("draft_model", "eagle3") else {})
    meant = {"ngram_gpu": "ngram", "mimo_mtp": "mtp", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp"}.get(method, method)
    if meant in METHODS:
        assert speculative_config_of(given).method == meant
        return
    with pytest.raises(ConfigError, match=f"^Speculation by {meant} is not supported: ") as caught:
        speculative_config_of(given)
    assert caught.value.fix
    assert caught.value.param == "speculative_config"


SPELLINGS: tuple[tuple[list[str], dict[str, Any]], ...] = (
    (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'], {"num_speculative_tokens": 4}),
    (["-sc", '{"model": "ngram"}'], {}),
    (["-sc.method", "ngram", "-sc.prompt_lookup_max=4"], {"prompt_lookup_min": 4, "prompt_lookup_max": 4}),
    (["--speculative-config.method=ngram", "--speculative_config.adaptive", "false"], {"adaptive": False}),
    (["--spec-method", "ngram", "--spec-tokens", "3"], {"num_speculative_tokens": 3}),
    (["--spec-model", "[ngram]"], {}),
    (["--spec-method", "ngram_gpu"], {}),
    (["--spec-tokens", "3", "-sc", '{"method": "ngram", "num_speculative_tokens": 3}'], {"num_speculative_tokens": 3}),
    (
        ["-sc", '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 64, 0]]}'],
        {"num_speculative_tokens_per_batch_size": ((1, 8, 5), (9, 64, 0))},
    ),
)


@pytest.mark.parametrize(("words", "fields"), SPELLINGS, ids=str)
def test_spellings(words: list[str], fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, _ = read(*words)
    assert config.speculative_config == SpeculativeConfig(method="ngram", **fields)
    assert config.sources["speculative_config"] == "flag"
    assert not caplog.records
    assert config.spec_method is config.spec_model is config.spec_tokens is None
    assert replace(config, max_num_seqs=2).speculative_config == config.speculative_config
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
    assert decoded.speculative_config == config.speculative_config, "the engine process gets the same"


def test_in_python_and_in_a_file(tmp_path: Path) -> None:
    config = EngineConfig.from_kwargs(speculative_config={"method": "suffix", "suffix_decoding_max_tree_depth": 12})
    assert config.speculative_config == SpeculativeConfig(
        method="suffix", num_speculative_tokens=12, suffix_decoding_max_tree_depth=12
    )
    assert config.sources["speculative_config"] == "argument"
    assert EngineConfig(speculative_config=config.speculative_config) == config
    assert EngineConfig.from_kwargs(speculative_config={}).speculative_config is None
    file = tmp_path / "quire.yaml"
    file.write_text("speculative-config: {method: ngram}\n")
    config, _ = read("--config", str(file))
    assert config.speculative_config == SpeculativeConfig(method="ngram")
    assert config.sources["speculative_config"] == "file"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--spec-tokens", "5"], ["does not say how to draft", "Name one with --spec-method or --spec-model"]),
        (["--spec-method", "ngam"], ["Unknown method 'ngam'", "Did you mean 'ngram'?"]),
        (["-sc", '{"methd": "ngram"}'], ["Unknown key 'methd'", "Did you mean 'method'?"]),
        (["-sc", "[1]"], []),
        (["-sc", '{"method": "ngram", "num_speculative_tokens": 0}'], ["Got 0. Expected a whole number, 1 to 255"]),
        (["-sc", '{"method": "ngram", "prompt_lookup_max": 99}'], ["Got 99. Expected a whole number, 1 to 32"]),
        (["-sc", '{"method": "ngram", "num_speculative_tokens": 2.5}'], ["Got 2.5. Expected a whole number"]),
        (["-sc", '{"method": "ngram", "num_speculative_tokens": true}'], ["Expected a whole number"]),
        (
            ["-sc", '{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}'],
            ["Illegal prompt_lookup_min", "Got 4. Expected at most prompt_lookup_max = 2"],
        ),
        (["-sc", '{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}'], ["Got 1.5. Expected a number from 0"]),
        (["-sc", '{"method": "ngram", "adaptive": "yes"}'], ["Illegal adaptive", "one of True, False"]),
        (["-sc", '{"method": "ngram", "rejection_sample_method": "block"}'], ["one of standard, synthetic"]),
        (
            ["-sc", '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 9]]}'],
            ["[first, last, tokens] for numbers of running requests"],
        ),
        (
            ["-sc", '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[4, 8, 1], [8, 9, 1]]}'],
            ["ascending"],
        ),
        (["-sc", '{"method": "ngram", "num_speculative_tokens_per_batch_size": 5}'], ["Got 5. Expected [first, last"]),
        (["-sc", '{"method": "ngram", "num_speculative_tokens_per_batch_size": [1, 4, 5]}'], ["Expected [first, last"]),
        (
            ["-sc", '{"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": 0.5}'],
            ["Illegal synthetic_acceptance_rates", "Expected 7 shares"],
        ),
        (
            ["-sc", '{"method": "ngram", "draft_tensor_parallel_size": 2}'],
            ["Got 2. Expected 1, or tensor_parallel_size = 1"],
        ),
        (["--spec-method", "draft_model"], ["Speculation by draft_model needs a model that drafts", "--spec-model"]),
        (
            ["--spec-method", "suffix", "-sc", '{"method": "ngram"}'],
            ["say different things", "Leave one of the two out"],
        ),
        (
            ["-sc", '{"model": "a/small", "method": "draft_model", "draft_load_config": {"download_dir": "/x"}}'],
            ["Illegal draft_load_config", "the key load_format alone, not download_dir"],
        ),
        (["--spec-method", "medusa"], ["Medusa's heads draft trees", "Use an EAGLE-3 head"]),
        (["--spec-method", "lookahead"], ["Use ngram or suffix"]),
        (["--spec-method", "qwen3_next_mtp"], ["only those of MiMo, DeepSeek-V3 and GLM-4.5 are built"]),
        (["--spec-method", "eagle", "--spec-model", "a/EAGLE-LLaMA3"], ["EAGLE's first heads", "EAGLE-3 checkpoint"]),
        (["--per-request-spec-decode-metrics", "summary"], ["There are no drafts", "Give --speculative-config too"]),
    ],
    ids=str,
)
def test_mistakes(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The value seen, the value expected and the advice; no stack, exit code 2."""
    assert main(["explain", *words]) == 2 if parts else True
    if not parts:
        with pytest.raises(SystemExit):
            read(*words)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("name", "config", "method"),
    [
        ("Qwen/Qwen3-0.6B", None, "draft_model"),
        ("Qwen/Qwen3-0.6B", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", None, "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", None, "eagle"),
        ("mine", {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ("mine", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ("mine", {"speculators_config": {"algorithm": "eagle3"}}, "eagle3"),
        ("mine", {"speculators_model_type": "eagle"}, "eagle"),
        ("mine", {"model_type": "medusa"}, "medusa"),
        ("mine", {"model_type": "mlp_speculator"}, "mlp_speculator"),
        ("z-lab/Qwen3-8B-DFlash-b16", None, "dflash"),
        ("/home/medusa/eagle-eye/Qwen3-0.6B/", {"model_type": "qwen3"}, "draft_model"),
        ("mine", {"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ("XiaomiMiMo/MiMo-7B-RL", {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}, "mtp"),
        ("mine", {"model_type": "deepseek_mtp"}, "mtp"),
        ("mine", {"architectures": None, "speculators_config": 3}, "draft_model"),
    ],
)
def test_method_of_a_checkpoint(name: str, config: dict[str, Any] | None, method: str) -> None:
    assert method_of_checkpoint(name, config) == method


def test_a_folder_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    for given in ({"model": tmp_path}, {"model": str(tmp_path)}, {"model": str(tmp_path), "method": "eagle"}):
        assert speculative_config_of(given).method == "eagle3"
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    with pytest.raises(ConfigError, match="Medusa's heads draft trees"):
        speculative_config_of({"model": str(tmp_path)})


def test_a_deep_suffix_tree_drafts_as_far_as_drafts_go() -> None:
    config, _ = read("-sc", '{"method": "suffix", "suffix_decoding_max_tree_depth": 512}')
    assert config.speculative_config.num_speculative_tokens == 255


def test_a_key_of_another_method_has_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = speculative_config_of({"method": "suffix", "prompt_lookup_max": 3, "model": "suffix"})
    assert config.effective() == SpeculativeConfig(method="suffix", num_speculative_tokens=24).effective()
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice == "speculative_config.prompt_lookup_max has no effect: speculation by suffix does not read it"


def test_synthetic_rates(caplog: pytest.LogCaptureFixture) -> None:
    """A mean length becomes shares, and a notice says that it changes the tokens."""
    rates = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=3,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(1.0, 0.5, 0.0),
    )
    given = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    with caplog.at_level(logging.WARNING):
        assert speculative_config_of({**given, "synthetic_acceptance_length": 2.5}) == rates
    assert "the tokens are WRONG" in caplog.text
    for wrong in ((0.5, 1.0, 0.0), (1.0, 0.5), (1.5, 0.5, 0.0)):
        with pytest.raises(ConfigError, match="Illegal synthetic_acceptance_rates"):
            replace(rates, synthetic_acceptance_rates=wrong)
    with pytest.raises(ConfigError, match="unless rejection_sample_method is synthetic"):
        speculative_config_of({"method": "ngram", "synthetic_acceptance_rates": [0.5] * 7})


def test_every_field_belongs_to_a_method() -> None:
    assert set(FIELDS) == {key for method in METHODS for key in keys_of(method)}


def test_explain_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--spec-method", "ngram", "--spec-tokens", "4", "--json"]) == 0
    setting = json.loads(capsys.readouterr().out)["settings"]["speculative_config"]
    assert setting["source"] == "flag"
    assert setting["value"] == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 5,
        "rejection_sample_method": "standard",
        "adaptive": True,
    }
    assert "a draft holds only if the model samples it, so no token changes" in setting["detail"]
    assert main(["explain", "--spec-method", "ngram", "--spec-tokens", "4"]) == 0
    text = capsys.readouterr().out
    assert re.search(r'^speculative_config +\{"method": "ngram", "num_speculative_tokens": 4, .*\[flag\]$', text, re.M)
    assert "    live    POST /v1/config moves it, up to 4" in text
    assert main(["explain"]) == 0
    assert re.search(r"^  speculative_config +None  \(no drafts\)$", capsys.readouterr().out, re.M)


def test_plan_says_what_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--spec-method", "ngram", "--spec-tokens", "4"]) == 0
    assert "drafts   ngram, at most 4 tokens a step, without weights and KV cache" in capsys.readouterr().out
    assert main(["plan", "--spec-method", "suffix"]) == 0
    assert "drafts   suffix, at most 24 tokens a step, with up to 80.0 MiB of main memory" in capsys.readouterr().out
    assert main(["plan", "--spec-model", str(quire.demo.path("draft")), "--spec-tokens", "4"]) == 0
    line = r"^drafts   draft_model, at most 4 tokens a step, with weights of \S+ MiB and [\d,]+ bytes of KV per token$"
    assert re.search(line, capsys.readouterr().out, re.M)


def test_drafts_are_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--spec-method", "ngram"]) == 2
    assert "Drafts are not simulated" in capsys.readouterr().err
