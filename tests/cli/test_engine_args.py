"""EngineArgs as vLLM's scripts use it: from arguments, and from the command line of a parser of their own."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

import quire
import quire.engine.arg_utils
from quire import AsyncEngineArgs, EngineArgs, EngineConfig
from quire.errors import ConfigError
from quire.option import options
from quire.utils import FlexibleArgumentParser


def _parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser()
    assert EngineArgs.add_cli_args(parser) is parser
    return parser


def test_names() -> None:
    assert EngineArgs is AsyncEngineArgs is quire.engine.arg_utils.EngineArgs is quire.engine.arg_utils.AsyncEngineArgs
    assert quire.AsyncLLMEngine is quire.AsyncLLM


def test_foreign_names_are_settled(caplog: pytest.LogCaptureFixture) -> None:
    args = EngineArgs("some/model", swap_space=4, pipeline_parallel_size=1, max_model_len="1k")
    assert (args.model, args.max_model_len) == ("some/model", 1000)
    assert "swap_space has no effect" in caplog.text
    with pytest.raises(ConfigError) as caught:
        EngineArgs(max_model_length=5)
    assert caught.value.param == "max_model_length"


def test_arguments_can_be_taken_apart_and_changed() -> None:
    args = EngineArgs(seed=3, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert EngineArgs(**vars(args)) == args
    assert EngineArgs(**dataclasses.asdict(args)) == args
    changed = dataclasses.replace(args, seed=4)
    assert (type(changed), changed.seed, changed.sources["seed"]) == (EngineArgs, 4, "argument")


def test_a_command_line_has_every_setting_and_its_default() -> None:
    args = _parser().parse_args([])
    assert vars(args) == {field.name: field.default for field in options(EngineConfig)}
    assert EngineArgs.from_cli_args(args) == EngineArgs()


def test_a_command_line_is_read_as_vllms(caplog: pytest.LogCaptureFixture) -> None:
    parser = _parser()
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--chat-template")
    parser.set_defaults(model="some/model")
    words = "--max_num_seqs 4 -tp 1 --no-enable-prefix-caching --hf-overrides.a.b 1 --disable-cascade-attn --prompt x"
    args = parser.parse_args(words.split())
    assert (args.prompt, args.chat_template, args.dtype) == ("x", None, "auto")
    config = EngineArgs.from_cli_args(args)
    assert (config.model, config.max_num_seqs, config.enable_prefix_caching) == ("some/model", 4, False)
    assert config.hf_overrides == {"a": {"b": 1}}
    assert "disable_cascade_attn has no effect" in caplog.text
    assert EngineArgs(**{name: value for name, value in vars(args).items() if name not in ("prompt", "chat_template")})


def test_argparses_own_parser() -> None:
    args = EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(["--max-num-seqs", "4"])
    assert EngineArgs.from_cli_args(args) == EngineArgs(max_num_seqs=4)


def test_words_of_no_flag_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = _parser()
    parser.add_argument("--prompt", default="Hello")
    for words in (["more"], ["--max-model-length", "5"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert f"unknown argument {words[0]!r}" in capsys.readouterr().err


def test_flags_of_the_asynchronous_engine_only() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(), async_args_only=True)
    assert vars(parser.parse_args([])) == {}


def test_a_config_file_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own flags too, also required ones; the command line wins."""
    file = tmp_path / "script.yaml"
    file.write_text(
        "model: some/model\nmax-num-seqs: 4\nenable-prefix-caching: false\nprompt: Hello\nverbose: true\n"
        "words: [a, b]\nmode: fast\nhf-overrides: {a: 1}\nseed: 3\n"
    )
    parser = _parser()
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--words", nargs="+")
    parser.add_argument("--mode", choices=["fast", "slow"])
    for words in (["--config", str(file), "--seed", "5"], ["--seed=5", f"--config={file}"]):
        args = parser.parse_args(words)
        assert (args.prompt, args.verbose, args.words, args.mode) == ("Hello", True, ["a", "b"], "fast")
        assert not hasattr(args, "config")
        config = EngineArgs.from_cli_args(args)
        assert (config.model, config.max_num_seqs, config.seed) == ("some/model", 4, 5)
        assert (config.enable_prefix_caching, config.hf_overrides) == (False, {"a": 1})
    wrongs = {
        "mode: quick": "one of fast, slow",
        "verbos: true": "Did you mean verbose?",
        "verbose: 1": "true or false",
    }
    for text, expected in wrongs.items():
        file.write_text(text)
        with pytest.raises(SystemExit):
            parser.parse_args(["--config", str(file)])
        assert expected in capsys.readouterr().err
    for words, expected in (
        (["--config"], "needs a file"),
        (["--config", "a", "--config", "b"], "given twice"),
        (["--config", "/nowhere"], "cannot be read"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert expected in capsys.readouterr().err


def test_a_script_may_have_a_config_of_its_own() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--config")
    assert parser.parse_args(["--config", "mine"]).config == "mine"
