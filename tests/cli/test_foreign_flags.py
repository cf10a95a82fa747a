"""Every name of vLLM's is decided: implemented, accepted with a notice, translated, or refused with the way out."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import pytest

from quire.compat.foreign import Foreign
from quire.compat.old_flags import OLD_FLAGS
from quire.compat.table import FOREIGN, SHORT_FLAGS, as_flag, settle
from quire.compat.values import FOREIGN_VALUES
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.formats.weight_format import ON_LOAD
from quire.hf_config.quantization import QUANTIZATION_NAMES
from quire.option import options
from quire.speculative_config import SpeculativeConfig
from tests.cli.reading import read

LINES = (Path(__file__).parent / "vllm_0_32_flags.txt").read_text().splitlines()[1:]
SPELLINGS = [spelling for line in LINES for spelling in line.split()]
OWN = {f.name for config in (EngineConfig, ServerConfig) for f in options(config)}
EVERY = sorted(FOREIGN.values(), key=lambda entry: entry.name)


@cache
def _actions() -> dict[str, object]:
    from quire.cli.main import build_parser

    return build_parser().parse_args(["serve"]).run.args[0]._option_string_actions  # type: ignore[no-any-return]


def _words(entry: Foreign) -> list[str]:
    """The flag, asking for something."""
    if entry.shape == "switch":
        is_on_anyway = any(value is True for value in entry.off)
        return ["--no-" + entry.name.replace("_", "-") if is_on_anyway else as_flag(entry.name)]
    return [as_flag(entry.name), "17"]


def test_the_list_is_whole() -> None:
    assert len(LINES) > 300
    assert len({line.split()[0] for line in LINES}) == len(LINES)


def test_flag_of_vllm_is_known() -> None:
    unknown = [flag for flag in SPELLINGS if flag not in _actions()]
    assert not unknown, "they are neither settings nor in quire.compat: decide what they are answered with"


def test_about_sixty_old_names() -> None:
    assert len(OLD_FLAGS) >= 60


def test_a_setting_is_not_foreign() -> None:
    assert not FOREIGN.keys() & OWN, "implemented now: remove it from quire.compat"


def test_short_flags_belong_to_foreign_names() -> None:
    assert SHORT_FLAGS.keys() <= FOREIGN.keys()


def test_foreign_values_belong_to_settings() -> None:
    assert FOREIGN_VALUES.keys() <= OWN


def test_every_entry_says_why() -> None:
    """One sentence without a full stop; a present flag it names exists."""
    known = {as_flag(name) for name in OWN | FOREIGN.keys()}
    for entry in EVERY:
        assert entry.text, entry.name
        assert entry.text[-1] not in ".!?", entry.name
        named = [word.strip("`,.:;") for word in f"{entry.text} {entry.instead}".split() if word.startswith("--")]
        assert set(named) <= known, f"{entry.name} points to a flag that does not exist"
        if entry.kind == "refused" and entry.instead.startswith("Use --"):
            assert entry.instead.split()[1].rstrip(".,") in {as_flag(name) for name in OWN}, entry.name


@pytest.mark.parametrize("entry", [entry for entry in EVERY if entry.kind == "refused"], ids=lambda entry: entry.name)
def test_refused(entry: Foreign) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*_words(entry))
    assert caught.value.param == entry.name
    assert as_flag(entry.name) in caught.value.message
    assert entry.text in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize("entry", [entry for entry in EVERY if entry.kind == "accepted"], ids=lambda entry: entry.name)
def test_accepted_with_one_notice(entry: Foreign, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(*_words(entry))
    if entry.shape == "switch" and {True, False} <= set(entry.off):
        return  # both ways are what happens anyway
    assert [record.getMessage() for record in caplog.records] == [f"{as_flag(entry.name)} has no effect: {entry.text}"]


def test_asking_for_nothing_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """None, and the values that are vLLM's defaults, in Python and as text."""
    with caplog.at_level(logging.WARNING):
        for entry in EVERY:
            for value in (None, "None", {}, *entry.off, *map(str, entry.off)):
                assert settle({entry.name: value}) == {}, entry.name
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-num-scheduled-tokens", "4k"], "max_num_batched_tokens", 4000),
        (["--max-num-active-seqs", "9"], "max_num_seqs", 9),
        (["-cc", '{"cudagraph_mode": "NONE", "level": 3}'], "cudagraph_mode", "NONE"),
        (["--compilation-config", '{"cudagraph_capture_sizes": [1, 8]}'], "cudagraph_capture_sizes", (1, 8)),
        (["-cc", '{"max_cudagraph_capture_size": 64}'], "max_cudagraph_capture_size", 64),
        (
            ["--rope-scaling", '{"rope_type": "linear", "factor": 2.0}', "--hf-overrides", '{"a": 1}'],
            "hf_overrides",
            {"a": 1, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            ["--ngram-prompt-lookup-max", "4", "-sc", '{"method": "ngram"}'],
            "speculative_config",
            SpeculativeConfig(method="ngram", prompt_lookup_min=4, prompt_lookup_max=4),
        ),
        (
            ["--ngram-prompt-lookup-min", "2", "-sc", '{"method": "ngram", "prompt_lookup_max": 6}'],
            "speculative_config",
            SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=6),
        ),
        (["--speculative-model", "[ngram]"], "speculative_config", SpeculativeConfig(method="ngram")),
        (
            ["--num-speculative-tokens", "3", "--spec-method", "ngram"],
            "speculative_config",
            SpeculativeConfig(method="ngram", num_speculative_tokens=3),
        ),
        (
            ["--speculative-disable-by-batch-size", "9", "--spec-method", "ngram", "--spec-tokens", "4"],
            "speculative_config",
            SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=4,
                num_speculative_tokens_per_batch_size=((1, 8, 4), (9, 1 << 20, 0)),
            ),
        ),
        (
            ["--num-redundant-experts", "4", "--enable-eplb", "-ep", "-tp", "2"],
            "eplb_config",
            {"num_redundant_experts": 4},
        ),
        (["--eplb-window-size", "10"], "eplb_config", {"window_size": 10}),
        (["--eplb-step-interval", "20"], "eplb_config", {"step_interval": 20}),
        (["--eplb-log-balancedness"], "eplb_config", {"log_balancedness": True}),
        (["--worker-use-ray"], "distributed_executor_backend", "ray"),
        (["--data-parallel-address", "10.0.0.1"], "master_addr", "10.0.0.1"),
    ],
)
def test_translated(words: list[str], name: str, value: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, _ = read(*words)
    assert getattr(config, name) == value
    assert config.sources[name] == "flag"
    (message,) = [record.getMessage() for record in caplog.records]
    flag = {"-cc": "--compilation-config"}.get(words[0], words[0])
    assert message.startswith(f"{flag} is taken as {as_flag(name)}")


def test_a_compilation_config_that_says_nothing_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read("--compilation-config", '{"level": 3}')
        read("--compilation-config", "3")
    assert len({record.getMessage() for record in caplog.records}) == 1
    assert caplog.records[0].getMessage().startswith("--compilation-config has no effect: nothing is compiled")


def test_every_translation_is_tested() -> None:
    translated = {entry.name for entry in EVERY if entry.kind == "translated"}
    of_text = {"ngram_prompt_lookup_max", "ngram_prompt_lookup_min", "speculative_disable_by_batch_size"}
    of_text |= {"speculative_model", "num_speculative_tokens"}
    assert translated == of_text | OF_A_DRAFTER.keys() | {
        "max_num_scheduled_tokens", "max_num_active_seqs", "rope_scaling", "compilation_config",
        "num_redundant_experts", "eplb_window_size", "eplb_step_interval", "eplb_log_balancedness", "worker_use_ray",
        "cpu_distributed_timeout_seconds", "data_parallel_address",
    }  # fmt: skip


# Old flag -> the key that it becomes, where only a drafter that is a model reads it.
OF_A_DRAFTER = {
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
}


@pytest.mark.parametrize(("name", "key"), OF_A_DRAFTER.items())
def test_old_flags_of_a_drafter(name: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert FOREIGN[name].translation("1") == {"speculative_config": {key: 1}}
    with caplog.at_level(logging.WARNING):
        read(as_flag(name), "1" if key != "quantization" else "awq", "--spec-method", "ngram")
    assert f"speculative_config.{key} has no effect: speculation by ngram does not read it" in caplog.text


def test_two_names_of_one_setting_must_agree() -> None:
    assert read("--max-num-active-seqs", "8", "--max-num-seqs", "8")[0].max_num_seqs == 8
    with pytest.raises(ConfigError, match=r"--max-num-active-seqs and --max-num-seqs say different things"):
        read("--max-num-active-seqs", "8", "--max-num-seqs", "16")


def test_all_refused_flags_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--enable-lora-bias.*Not supported either: --middleware, --task"):
        read("--enable-lora-bias", "--task", "embed", "--middleware", "m", "--max-loras", "2")


def test_python_spelling(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = EngineConfig.from_kwargs(swap_space=4, max_num_active_seqs=3, cpu_offload_gb=0, seed=None)
    assert config.max_num_seqs == 3
    assert config.sources["max_num_seqs"] == "argument"
    assert [record.getMessage().split()[0] for record in caplog.records] == ["max_num_active_seqs", "swap_space"]
    assert EngineConfig.from_kwargs(cpu_distributed_timeout_seconds=30).distributed_timeout_seconds == 30
    with pytest.raises(ConfigError, match=r"^rope_theta is not supported"):
        EngineConfig.from_kwargs(rope_theta=1e4)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_sequences", "max_num_seqs"),
        ("speculativ_model", "speculative_model"),
        ("port", "It is a setting of `quire serve`"),
        ("xyzzy", "--help"),
    ],
)
def test_unknown_argument_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{name: 1})
    assert hint in caught.value.message


# The values of `--quantization`: QuantizationMethods of vLLM 0.32, and older names that are in many guides.
QUANTIZATIONS = (
    "awq", "auto_awq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4", "modelopt_mxfp8",
    "modelopt_mixed", "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming", "compressed-tensors",
    "experts_int8", "quark", "moe_wna16", "torchao", "inc", "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8", "online",
    "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8",
    "gguf", "bitsandbytes", "ptpc_fp8", "hqq", "auto-round", "aqlm",
)  # fmt: skip
RUN = {
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), "awq"),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), "gptq"),
    **{name: name for name in ("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "mxfp4", "gguf")},
    "gpt_oss_mxfp4": "mxfp4",
    "fp8_per_channel": "fp8",
}


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_quantization_of_vllm(name: str) -> None:
    """It means what it means there, or is refused with a flag or a checkpoint that runs."""
    if name in RUN:
        given = read("--quantization", name)[0].quantization
        assert given is not None
        assert QUANTIZATION_NAMES[given] == RUN[name]
        return
    with pytest.raises(ConfigError, match=f"^quantization {name} is not supported: ") as caught:
        read("--quantization", name)
    assert caught.value.param == "quantization"
    assert caught.value.fix is not None
    named = {word.strip(",.") for word in caught.value.fix.split()} & {*ON_LOAD, *QUANTIZATION_NAMES}
    assert named, "no value that runs is named"
    for value in named:
        read("--quantization", value)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--quantization", "int3"], "int8, int4, fp8, which quantize a checkpoint in floating point"),
        (["--kv-cache-dtype", "nvfp4"], "Use fp8 or fp8_e5m2"),
        (["--kv-cache-dtype", "fp8_inc"], "Use fp8 or fp8_e5m2"),
        (["--kv-cache-dtype", "int8_per_token_head"], "Use int8"),
        (["--kv-cache-dtype", "fp9"], "one of auto, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2, int8"),
        (["--load-format", "pt"], "they can run code. Convert the model to safetensors"),
        (["--load-format", "runai_streamer"], "name the folder of the model by its URL, such as s3://bucket/folder"),
        (["--load-format", "runai_streamer_sharded"], "by its URL"),
        (["--load-format", "tensorizer"], "by its URL"),
        (["--load-format", "sharded_state"], "only safetensors checkpoints"),
        (["--tokenizer-mode", "mistral"], "tokenizer.json"),
        (["--logprobs-mode", "raw_logits"], "Use raw_logprobs"),
        (["--model-impl", "terratorch"], "text only"),
        (["--per-request-spec-decode-metrics", "detail"], "Did you mean 'detailed'?"),
        (["--dtype", "bfloat61"], "Did you mean 'bfloat16'?"),
        (["--scheduling-policy", "lifo"], "one of fcfs, priority"),
        (["--log-level", "loud"], "one of debug, info, warning, error"),
    ],
)
def test_foreign_value_says_why(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert part in caught.value.message


def test_load_format_hf_is_auto() -> None:
    assert read("--load-format", "hf")[0].load_format == "auto"
