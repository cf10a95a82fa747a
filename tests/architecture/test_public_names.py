"""Every public name can be imported, and the command line knows the flags the docs promise."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import quire
from quire.cli.main import build_parser
from quire.config import EngineConfig, ServerConfig, parse_human_int
from quire.errors import ConfigError
from quire.option import options


@pytest.mark.parametrize("name", quire.__all__)
def test_public_name_exists(name: str) -> None:
    assert getattr(quire, name) is not None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("quire.engine.arg_utils", "AsyncEngineArgs"),
        ("quire.engine.arg_utils", "EngineArgs"),
        ("quire.engine.async_llm_engine", "AsyncLLMEngine"),
        ("quire.engine.llm_engine", "LLMEngine"),
        ("quire.entrypoints.llm", "LLM"),
        ("quire.inputs", "TokensPrompt"),
        ("quire.outputs", "RequestOutput"),
        ("quire.sampling_params", "SamplingParams"),
        ("quire.v1.engine.async_llm", "AsyncLLM"),
        ("quire.v1.engine.llm_engine", "LLMEngine"),
    ],
)
def test_module_path_of_vllm(path: str, name: str) -> None:
    assert getattr(importlib.import_module(path), name) is getattr(quire, name)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchName"):
        quire.NoSuchName  # noqa: B018


def test_every_config_field_has_help_and_a_flag() -> None:
    actions = build_parser()._subparsers._group_actions[0].choices["serve"]._option_string_actions  # type: ignore[union-attr]
    for config in (EngineConfig, ServerConfig):
        for field in options(config):
            assert field.metadata["help"], field.name
            assert "--" + field.name.replace("_", "-") in actions, field.name


@pytest.mark.parametrize(
    ("words", "near"),
    [(["serve", "--max-model-length", "5"], "--max-model-len"), (["serve", "--blocksize", "16"], "--block-size")],
)
def test_misspelt_flag_names_the_nearest(words: list[str], near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(words)
    assert caught.value.code == 2
    assert f"did you mean {near}?" in capsys.readouterr().err


def test_underscores_in_flags_are_dashes() -> None:
    args = build_parser().parse_args(["serve", "some/model", "--max_model_len", "32k", "--no_enable_prefix_caching"])
    assert (args.max_model_len, args.enable_prefix_caching, args.model_tag) == (32000, False, "some/model")


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("32k", 32000), ("32K", 32768), ("1M", 1 << 20), ("2.5k", 2500), ("-1", -1)]
)
def test_human_numbers(text: str, value: int) -> None:
    assert parse_human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.0001k", "x", "1e3", "nan", "1.e400", "nan.0"])
def test_bad_human_numbers(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_human_int(text)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dtype", "int8"),
        ("block_size", 17),
        ("gpu_memory_utilization", 1.5),
        ("max_model_len", -2),
        ("watermark", 1.0),
        ("max_num_seqs", 0),
        ("trust_remote_code", True),
        ("quantization", "bitsandbytes"),
        ("tensor_parallel_size", 0),
        ("scheduling_policy", "lifo"),
        ("no_such_argument", 1),
    ],
)
def test_illegal_engine_argument_names_itself(argument: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{argument: value})
    assert caught.value.param == argument


def test_help_says_what_serve_does() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "--help"], capture_output=True, text=True, check=True
    )
    assert "serve" in output.stdout
