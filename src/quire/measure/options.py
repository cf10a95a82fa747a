"""The options of `quire bench`, with vLLM's names: one dataclass per group of flags."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.errors import ConfigError
from quire.option import POSITIVE, Bounds, check_types, check_values, normalise, option, options, parse_human_int

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "timed_trace")
INFINITE = float("inf")
T = TypeVar("T")


class _Checked:
    """Checks types and choices of its fields in the constructor."""

    def __post_init__(self) -> None:
        normalise(self)
        check_types(self)
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class Workload(_Checked):
    """The options of the requests."""

    dataset_name: str = option("random", "Source of the prompts.", choices=DATASETS)
    dataset_path: str | None = option(
        None, "File of the data set: sharegpt JSON, custom JSONL (prompt, output_tokens), timed_trace JSONL."
    )
    num_prompts: int = option(1000, "Number of requests.", type=parse_human_int, bounds=POSITIVE)
    seed: int = option(0, "The same seed gives the same requests and arrivals.")
    input_len: int | None = option(
        None, "Tokens of a prompt, for every data set.", type=parse_human_int, bounds=POSITIVE
    )
    output_len: int | None = option(
        None, "Tokens of an answer, for every data set.", type=parse_human_int, bounds=POSITIVE
    )
    random_input_len: int = option(1024, "Tokens of a random prompt.", type=parse_human_int)
    random_output_len: int = option(
        128, "Tokens of the answer to a random prompt.", type=parse_human_int, bounds=POSITIVE
    )
    random_range_ratio: str = option(
        "0.0", 'Lengths are drawn within this share of the mean; or {"input": 0.3, "output": 0.5}.'
    )
    random_prefix_len: int = option(0, "Tokens of a common prefix of all random prompts.", flags=("--prefix-len",))
    prefix_repetition_prefix_len: int = option(256, "Tokens of a shared prefix.")
    prefix_repetition_suffix_len: int = option(256, "Tokens of a prompt after its prefix.")
    prefix_repetition_num_prefixes: int = option(10, "Number of different prefixes.", bounds=POSITIVE)
    prefix_repetition_output_len: int = option(128, "Tokens of an answer.", bounds=POSITIVE)
    sharegpt_output_len: int | None = option(None, "Tokens of an answer; default: the length of the recorded answer.")
    custom_output_len: int = option(256, "Tokens of an answer; -1: the file's output_tokens.")
    skip_chat_template: bool = option(False, "Send custom prompts without a chat template.")
    disable_shuffle: bool = option(False, "Keep the file's order.")
    oversample: bool = option(True, "Repeat entries of a file that has too few.")
    timed_trace_chunk_hash_size: int = option(16, "Tokens for each id of hash_ids.", bounds=POSITIVE)
    timed_trace_sec_multiplier: float = option(
        1.0,
        "Seconds of one unit of the trace's time; 0.001 for milliseconds.",
        bounds=Bounds(sys.float_info.min, sys.float_info.max, "a number of seconds, more than 0"),
    )
    timed_trace_label_timestamp: str = option("timestamp", "Key of the time.")
    timed_trace_label_input_length: str = option("input_length", "Key of the prompt's length.")
    timed_trace_label_output_length: str = option("output_length", "Key of the answer's length.")
    timed_trace_label_hash_ids: str = option("hash_ids", "Key of the list of ids; equal ids are equal tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_file = self.dataset_name in ("sharegpt", "custom", "timed_trace")
        if is_file != (self.dataset_path is not None):
            raise ConfigError(
                f"--dataset-name {self.dataset_name} " + ("needs a file" if is_file else "reads no file"),
                fix="Name it with --dataset-path" if is_file else "Leave --dataset-path out, or name its kind",
                param="dataset_path",
            )


@dataclass(frozen=True, kw_only=True)
class Traffic(_Checked):
    """The options of the arrival times."""

    request_rate: float = option(
        INFINITE,
        "Requests per second on average; inf: all at once.",
        bounds=Bounds(sys.float_info.min, INFINITE, "more than 0"),
    )
    burstiness: float = option(
        1.0,
        "Shape of the gamma distribution of the gaps: 1 is Poisson, less comes in bursts, inf is a clock.",
        bounds=Bounds(sys.float_info.min, INFINITE, "more than 0"),
    )
    max_concurrency: int | None = option(
        None, "Requests in flight at most; others wait in the client.", bounds=POSITIVE
    )
    ramp_up_strategy: str | None = option(None, "How the rate grows over the run.", choices=("linear", "exponential"))
    ramp_up_start_rps: float | None = option(None, "Rate of the first request.")
    ramp_up_end_rps: float | None = option(None, "Rate of the last request.")
    self_timed: bool | None = option(None, "Keep the times of the trace (default with timed_trace).")
    num_warmups: int = option(0, "Requests before the run, which do not count; their random prompts are not repeated.")
    num_rounds: int = option(
        1, "Number of runs, each with its own prompts; three or more can be compared.", bounds=POSITIVE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ramp != (None, None):
                raise ConfigError("A ramp needs --ramp-up-strategy", expected="linear or exponential")
        elif None in ramp or not 0 <= (ramp[0] or 0) <= (ramp[1] or 0) or not ramp[1]:
            raise ConfigError(
                "The ramp has no start rate or no end rate",
                value=ramp,
                expected="--ramp-up-start-rps <= --ramp-up-end-rps",
            )
        elif self.ramp_up_strategy == "exponential" and not ramp[0]:
            raise ConfigError("An exponential ramp cannot start at 0", fix="Raise --ramp-up-start-rps")
        elif self.request_rate != INFINITE:
            raise ConfigError("The ramp and --request-rate both set the rate", fix="Leave --request-rate out")


@dataclass(frozen=True, kw_only=True)
class Target(_Checked):
    """The options of the server and of its answers."""

    backend: str = option("openai", "API of the server.", choices=("openai", "vllm", "openai-chat"))
    base_url: str | None = option(None, "Address of the server, without /v1.")
    host: str = option("127.0.0.1", "Host, without --base-url.")
    port: int = option(8000, "Port, without --base-url.")
    endpoint: str | None = option(None, "Path; none: /v1/completions, or /v1/chat/completions for openai-chat.")
    model: str | None = option(None, "Model; none: the first one served.")
    served_model_name: str | None = option(None, "The server's name of the model, if different.")
    tokenizer: str | None = option(None, "Folder or hub id of the tokenizer; none: the model's.")
    tokenizer_mode: str = option("auto", "How to read the tokenizer.", choices=("auto", "hf", "slow"))
    header: tuple[str, ...] = option((), "KEY=VALUE sent with each request.", many=True, secret=True)
    insecure: bool = option(False, "Do not check certificates.")
    ready_check_timeout_sec: int = option(0, "Seconds to wait for the server.")
    ignore_eos: bool = option(False, "Answers have their full length (always with random and timed_trace).")
    logprobs: int | None = option(None, "Request the logprobs of this number of tokens.")
    temperature: float | None = option(None, "Sampling temperature; none: the server's.")
    top_p: float | None = option(None, "Nucleus sampling.")
    top_k: int | None = option(None, "Sample among the first k.")
    min_p: float | None = option(None, "Least share of the most likely token's probability.")
    frequency_penalty: float | None = option(None, "Frequency penalty.")
    presence_penalty: float | None = option(None, "Presence penalty.")
    repetition_penalty: float | None = option(None, "Repetition penalty.")
    extra_body: dict[str, Any] | None = option(None, "JSON object merged into each request.", type="json")
    lora_modules: tuple[str, ...] = option(
        (), "Names of adapters that the server has: each request asks for one of them.", many=True
    )
    lora_assignment: str = option("random", "How requests get their adapters.", choices=("random", "round-robin"))

    @property
    def url(self) -> str:
        """The address of the server, without a path."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")


@dataclass(frozen=True, kw_only=True)
class Report(_Checked):
    """The options of the report."""

    percentile_metrics: str = option("ttft,tpot,itl", "Metrics with percentiles: ttft, tpot, itl, e2el.")
    metric_percentiles: str = option("99", "Percentiles, separated by commas.")
    goodput: tuple[str, ...] = option((), "Limits in ms for a good request: ttft:200 tpot:50 e2el:3000.", many=True)
    save_result: bool = option(False, "Write a JSON file.")
    save_detailed: bool = option(False, "Also write the times of each request.")
    append_result: bool = option(False, "Add a line to the JSON file.")
    result_dir: str | None = option(None, "Folder of the file.")
    result_filename: str | None = option(None, "Name of the file.")
    label: str | None = option(None, "Name of the run; none: the backend.")
    metadata: tuple[str, ...] = option((), "KEY=VALUE kept in the JSON file.", many=True)
    plot: str | None = option(None, "Write a page with plots, one HTML file that loads nothing.")
    disable_tqdm: bool = option(False, "No progress bars.")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("ttft", "tpot", "itl", "e2el")
        if unknown := [name for name in self.percentile_metrics.split(",") if name not in known]:
            raise ConfigError("Unknown metric in --percentile-metrics", value=unknown, expected=", ".join(known))
        self.percentiles()
        self.limits_ms()
        key_values(self.metadata, "--metadata")

    def percentiles(self) -> list[float]:
        try:
            found = [float(text) for text in self.metric_percentiles.split(",")]
        except ValueError:
            found = [-1.0]
        if not all(0 <= value <= 100 for value in found):
            raise ConfigError("Illegal --metric-percentiles", value=self.metric_percentiles, expected="such as 50,99")
        return found

    def limits_ms(self) -> dict[str, float]:
        """The limits of --goodput by metric, in milliseconds."""
        limits = {}
        for pair in self.goodput:
            name, _, text = pair.partition(":")
            if name not in ("ttft", "tpot", "e2el") or not text.replace(".", "", 1).isdigit():
                raise ConfigError(
                    "Illegal --goodput", value=pair, expected="ttft:MS, tpot:MS or e2el:MS, such as ttft:200"
                )
            limits[name] = float(text)
        return limits


def key_values(pairs: tuple[str, ...], flag: str) -> dict[str, str]:
    """KEY=VALUE pairs as a dict. Raises ConfigError for a pair without `=`."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ConfigError(f"Illegal {flag}", value=wrong[0], expected="KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}


def from_args(kind: type[T], args: argparse.Namespace, **more: Any) -> T:
    """The group `kind` from the command line; `more` overrides it."""
    return kind(**given(kind, args) | more)


def given(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the group `kind` that were given on the command line."""
    values = vars(args)
    return {f.name: values[f.name] for f in options(kind) if f.name in values}
