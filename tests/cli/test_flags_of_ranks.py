"""Every flag of vLLM's for several ranks is decided, in `quire serve` and in LLM(...): does what it says, has no effect
with a notice, or is refused with a reason.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.compat.table import FOREIGN
from quire.config import EngineConfig
from quire.eplb_config import EplbConfig
from quire.errors import ConfigError
from tests.cli.reading import read

# Words of a command line -> the settings that they become.
SETTINGS: dict[str, dict[str, Any]] = {
    "-tp 2": {"tensor_parallel_size": 2},
    "--tensor-parallel-size 2": {"tensor_parallel_size": 2},
    "-pp 2": {"pipeline_parallel_size": 2},
    "--pipeline-parallel-size 2": {"pipeline_parallel_size": 2},
    "-tp 2 -dcp 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "-tp 2 --decode-context-parallel-size 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "-tp 2 -ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "-tp 2 --enable-expert-parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "-dp 2": {"data_parallel_size": 2},
    "--data-parallel-size 2": {"data_parallel_size": 2},
    "-dp 2 --data-parallel-size-local 2": {"data_parallel_size": 2, "data_parallel_size_local": 2},
    "-dp 2 --data-parallel-backend mp": {"data_parallel_size": 2, "data_parallel_backend": "mp"},
    "-dp 2 --data-parallel-backend ray": {"data_parallel_size": 2, "data_parallel_backend": "ray"},
    **{
        f"-tp {width} --distributed-executor-backend {name}": {"distributed_executor_backend": name}
        for width, name in ((2, "mp"), (2, "ray"), (1, "uni"), (2, "external_launcher"))
    },
    "-pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29502": {
        "nnodes": 2,
        "node_rank": 0,
        "master_addr": "10.0.0.1",
        "master_port": 29502,
    },
    "-pp 2 --nnodes 2 --node-rank 1 --headless": {"node_rank": 1, "headless": True},
    "-dp 4 -ep --data-parallel-size-local 2": {"data_parallel_size_local": 2},
    "-dp 4 -ep -dpl 2 -dpr 2 --headless": {"data_parallel_start_rank": 2},
    "--device-ids 2,3": {"device_ids": ("2,3",)},
    "-tp 2 --numa-bind": {"numa_bind": True},
    "-tp 2 --numa-bind-nodes 0 1": {"numa_bind_nodes": (0, 1)},
    "-tp 2 --numa-bind-cpus 0-3 4-7": {"numa_bind_cpus": ("0-3", "4-7")},
    "-tp 2 -ep --enable-eplb": {"enable_eplb": True},
    "-tp 2 --enable-batch-sharded-sampling": {"enable_batch_sharded_sampling": True},
    **{
        f"-tp 2 -ep --expert-placement-strategy {name}": {"expert_placement_strategy": name}
        for name in ("linear", "round_robin")
    },
    "-tp 4 --max-parallel-loading-workers 2": {"max_parallel_loading_workers": 2},
    "--distributed-timeout-seconds 30": {"distributed_timeout_seconds": 30},
    "--cpu-distributed-timeout-seconds 30": {"distributed_timeout_seconds": 30},
}
# Flags that change nothing here, with a word of the notice.
ACCEPTED = {
    "--enable-ep-weight-filter": "its own experts only",
    "--enable-fault-tolerance": "a failed engine always replaced, without orders from outside",
    '--fault-tolerance-config {"auto_recovery":true}': "a failed step is always computed again",
    **{
        f"--all2all-backend {name}": "memory that they share, or on GPUs by NCCL"
        for name in (
            *("naive", "pplx", "deepep_high_throughput", "deepep_low_latency", "allgather_reducescatter"),
            *("mori", "nixl_ep", "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided"),
        )
    },
    **{
        f"--dcp-comm-backend {name}": "partial results through memory that they share, or on GPUs by NCCL"
        for name in ("ag_rs", "a2a")
    },
    "--dcp-q-replicate": "fewer bytes than the weights to compute them",
    "--dcp-kv-cache-interleave-size 16": "because attention sums 256 positions at a time",
    "--cp-kv-cache-interleave-size 1": "because attention sums 256 positions at a time",
    "--disable-custom-all-reduce": "or on GPUs by NCCL",
}
# Flags that are refused, with a word of the reason.
REFUSED = {
    "-pcp 2": "in chunks by all ranks together",
    "--prefill-context-parallel-size 2": "in chunks by all ranks together",
    "--enable-elastic-ep": "does not change after the start",
    "--enable-dbo": "computed together",
    "--worker-cls a.module.Worker": "",
}
EPLB = {
    "window_size": 10,
    "step_interval": 20,
    "num_redundant_experts": 2,
    "log_balancedness": True,
    "log_balancedness_interval": 5,
    "use_async": False,
    "policy": "default",
    "communicator": "torch_gloo",
}


@pytest.mark.parametrize("words", SETTINGS)
def test_settings(words: str) -> None:
    config, _ = read(*words.split())
    for name, value in SETTINGS[words].items():
        assert getattr(config, name) == value, name
        assert config.sources[name] == "flag"
    names = {name for name, source in config.sources.items() if source == "flag"}
    given = {name: getattr(config, name) for name in names}
    as_arguments = EngineConfig.from_kwargs(**given)  # as LLM(...) takes them
    assert {name: getattr(as_arguments, name) for name in names} == given


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("-dp 4 -ep --nnodes 2", (2, 0)),
        ("-dp 4 -ep -dpl 2", (2, 0)),
        ("-dp 4 -ep -dpl 2 --nnodes 2", (2, 0)),
        ("-dp 4 -ep -dpl 2 -dpr 2 --headless", (2, 1)),
        ("-dp 8 -ep -dpl 2 --data-parallel-start-rank 6 --node-rank 3 --headless", (4, 3)),
        ("-dp 4 -ep --nnodes 2 -dpr 2 --headless", (2, 1)),
        ("-dp 4 -ep -dpl 4", (1, 0)),
    ],
)
def test_machines_of_lanes(words: str, places: tuple[int, int]) -> None:
    """In vLLM's words too: how many lanes a machine has, and which is its first one."""
    config, _ = read(*words.split(), "-dpa", "10.0.0.1", "--data-parallel-rpc-port", "13345")
    assert (config.nnodes, config.node_rank) == places
    assert config.num_local_ranks == config.data_parallel_size // config.nnodes
    assert config.master_addr == "10.0.0.1"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("-dp 4 -ep --nnodes 3", "3 machines cannot share 4 lanes of 1 rank[.].*one of 1, 2, 4: .* whole lanes"),
        ("-dp 2 -tp 2 -ep --nnodes 4", "4 machines cannot share 2 lanes of 2 ranks[.].*one of 1, 2:"),
        ("-dp 4 -ep -dpl 3", "Machines cannot have so many lanes each. Got 3. Expected a divisor of .* = 4"),
        ("-dp 4 -ep -dpl 0", "Machines cannot have so many lanes each"),
        (
            "-dp 4 -ep -dpl 2 --nnodes 4",
            "nnodes and data_parallel_size_local say different things. Got .nnodes = 4, and .* nnodes = 2",
        ),
        ("-dp 4 -ep -dpl 2 -dpr 3 --headless", "No machine begins with this lane. Got 3. Expected 0, 2"),
        ("-dp 4 -ep -dpl 2 -dpr 4 --headless", "No machine begins with this lane"),
        ("-dp 4 -ep -dpl 1 -dpr 2 -r 1 --headless", "node_rank and data_parallel_start_rank say different things"),
        ("-dp 4 -ep -dpl 2 -dpr 2", "Only machine 0 runs the server"),
        ("-dp 4 --nnodes 2", "Each of several replicas is on one machine.*give --enable-expert-parallel"),
    ],
)
def test_machines_that_cannot_have_the_lanes(words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(*words.split())


def _as_argument(words: str) -> tuple[str, Any]:
    flag, *values = words.split()
    name = {"-pcp": "prefill_context_parallel_size"}.get(flag, flag.removeprefix("--").replace("-", "_"))
    return name, values[0] if values else True


@pytest.mark.parametrize("words", ACCEPTED)
def test_without_effect(words: str, caplog: pytest.LogCaptureFixture) -> None:
    name, value = _as_argument(words)
    with caplog.at_level(logging.WARNING):
        config, _ = read(*words.split())
        assert config == EngineConfig.from_kwargs(**{name: value})
    assert config == EngineConfig()
    assert [ACCEPTED[words] in record.getMessage() for record in caplog.records] == [True] * len(caplog.records)
    assert caplog.records


def test_an_interleave_of_whole_blocks_is_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, _ = read("-tp", "2", "-dcp", "2", "--dcp-kv-cache-interleave-size", "256")
    assert config.decode_context_parallel_size == 2
    assert not caplog.records


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str) -> None:
    name, value = _as_argument(words)
    why = REFUSED[words] or FOREIGN[name].text
    for ask in (lambda: read(*words.split()), lambda: EngineConfig.from_kwargs(**{name: value})):
        with pytest.raises(ConfigError) as error:
            ask()
        assert error.value.param == name
        assert why in error.value.message


def test_every_key_of_eplb_config() -> None:
    config, _ = read("-tp", "2", "-ep", "--enable-eplb", *(f"--eplb-config.{key}={_text(EPLB[key])}" for key in EPLB))
    assert config.balancing == EplbConfig(**EPLB)  # type: ignore[arg-type]
    assert EPLB.keys() == EplbConfig.__dataclass_fields__.keys()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
