"""The first screen of `quire serve`: first the machine; when it is ready, memory, choices and addresses.

The lines fit 80 columns unless names are long. In JSON logs each part is a record with the same facts as fields.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from quire import __version__, envs, extension, logs
from quire.entry.listen import Address
from quire.messages import EngineReady
from quire.metrics.stopwatch import busy_machine
from quire.planning.estimate import Estimate
from quire.resolve import DeviceFacts, shown_bytes
from quire.screen.memory_lines import MemorySummary
from quire.screen.terminal import Style

logger = logs.get_logger(__name__)

WIDTH = 80
LABEL_WIDTH = 9
INDENT = " " * (LABEL_WIDTH + 3)
MOST_NAMES = 5  # the most names of adapters
CHOSEN = (
    "dtype", "num_threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "enable_prefix_caching",
)  # fmt: skip
CHOSEN_ON_GPU = ("device", *(name for name in CHOSEN if name != "num_threads"))
EXPECTED = ("expected_tokens_per_second", "expected_total_tokens_per_second", "expectation_waited_share")
WHY = "why: quire explain"
_ISA_NAMES = {
    "amx": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "neon_i8mm": "NEON I8MM",
    "neon_dotprod": "NEON DOTPROD",
    "neon": "NEON",
    "torch": "(plain torch)",
}
# The demo model can answer it.
QUESTION = '{"messages":[{"role":"user","content":"What does len() do?"}]}'
PROMPT = '{"prompt":"Hello"}'


def show_header(model_name: str, device: DeviceFacts, *, has_gpu: bool) -> None:
    """Show program, model and machine, and a line about missing kernels."""
    text = f"quire {__version__} serves {model_name}"
    if logs.is_json():
        machine = {
            "name": device.name,
            "isa": device.isa,
            "num_cores": device.num_cores,
            "total_memory_bytes": device.total_memory_bytes,
            "free_memory_bytes": device.free_memory_bytes,
            "has_gpu": has_gpu,
        }
        logger.info(text, extra=logs.fields(version=__version__, model=model_name, machine=machine))
    else:
        _print([_header(text, _machine(device, has_gpu=has_gpu), Style(sys.stderr))])
    show_missing_kernels()


def _machine(device: DeviceFacts, *, has_gpu: bool) -> str:
    cores = "1 core" if device.num_cores == 1 else f"{device.num_cores} cores"
    gpu = "GPU" if has_gpu else "no GPU"  # the ready engine says whether it uses the GPU
    return f"{cores} {_ISA_NAMES.get(device.isa, device.isa)} · {shown_bytes(device.total_memory_bytes)} RAM · {gpu}"


def _header(text: str, machine: str, style: Style) -> str:
    """The text and the machine, on one line if both fit."""
    gap = WIDTH - len(text) - len(machine) - 2
    between = " " * gap if gap >= 2 else f"\n{INDENT}"
    return f"  {style(text, 'bold')}{between}{machine}"


def show_missing_kernels() -> None:
    """Say why the compiled kernels do not run, and what to do. It says nothing if they run."""
    if extension.is_used():
        return
    what, fix = "The compiled kernels are not used", f"Unset {envs.FORCE_REFERENCE.name}"
    if extension.C is None:
        what, fix = f"The compiled kernels are missing ({extension.WHY_NOT})", extension.how_to_build()
    what += ": plain torch computes, several times slower"
    if logs.is_json():
        logger.warning(what, extra=logs.fields(fix=fix))
        return
    style = Style(sys.stderr)
    # People copy the command, so its flags stay whole.
    lines = textwrap.wrap(f"{what}. {fix}.", WIDTH - len(INDENT), break_on_hyphens=False, break_long_words=False)
    _print(_labelled("kernels", lines, style, "yellow"))


def show_ready(
    ready: EngineReady, model_name: str, address: Address, *, has_chat: bool, needs_key: bool, seconds: dict[str, float]
) -> None:
    """Show the facts about a server that is ready. `seconds`: the time of each phase of the start."""
    settings: dict[str, Any] = ready.resolved
    memory = MemorySummary.of({name: setting["value"] for name, setting in settings.items()})
    names = CHOSEN if settings["device"]["value"] == "cpu" else CHOSEN_ON_GPU
    chosen = {name: settings[name] for name in names}
    if logs.is_json():
        choices = {name: {"value": made["value"], "source": made["source"]} for name, made in chosen.items()}
        extra = logs.fields(
            url=address.name,
            model=model_name,
            memory=memory.as_dict(),
            replicas=settings["data_parallel_size"]["value"],
            chosen=choices,
            speculation=settings["speculative_config"]["value"],
            expected={name: _predicted(settings[name]) for name in EXPECTED},
            seconds_by_phase=seconds,
        )
        logger.info("ready: %s", address.name, extra=extra)
        return
    style = Style(sys.stderr)
    items = [f"{name} {_shown(made['value'])} ({made['source']})" for name, made in chosen.items()]
    lines = [
        "",
        *_labelled("replicas", _replicas(settings), style),
        *_labelled("memory", [memory.plan()], style),
        *_labelled("fits", memory.capacity(), style),
        *_labelled("chosen", _flowed([*items, WHY]), style),
        *_labelled("drafts", _drafts(settings["speculative_config"]), style),
        *_labelled("adapters", _adapters(settings), style),
        *_labelled("expect", _expectation(*(settings[name] for name in (*EXPECTED, "max_num_seqs"))), style),
        "",
        *_labelled(
            "ready",
            _addresses(style(address.name, "bold", "green"), has_page=has_chat and address.has_browser),
            style,
            "green",
        ),
        *_labelled("try", _curl(address, has_chat=has_chat, needs_key=needs_key), style),
        "",
    ]
    _print(lines)


def _replicas(settings: dict[str, Any]) -> Iterator[str]:
    """A line with the number of replicas; no line for one replica."""
    if (count := settings["data_parallel_size"]["value"]) > 1:
        threads = settings["num_threads"]["value"]
        share = f", each with {threads} {'thread' if threads == 1 else 'threads'}"
        what = "lanes that share experts" if settings["enable_expert_parallel"]["value"] else "engines"
        yield f"{count} {what}{share * (settings['device']['value'] == 'cpu')}; the lines below are of one of them"


def _drafts(setting: dict[str, Any]) -> Iterator[str]:
    """A line with the drafter and its limit; no line if the server does not speculate."""
    if (speculation := setting["value"]) is not None:
        by = f"{speculation['method']} ({speculation['model']})" if "model" in speculation else speculation["method"]
        yield f"{by}, at most {speculation['num_speculative_tokens']} tokens a step ({setting['source']})"


def _adapters(settings: dict[str, Any]) -> Iterator[str]:
    """Lines with the adapters of the start and their limits; no line if the server takes no adapters."""
    if not settings["enable_lora"]["value"]:
        return
    names = settings["lora_modules"]["value"]
    items = [*names[:MOST_NAMES], *([f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else [])]
    limits = [f"{settings['max_loras']['value']} in a step", f"{settings['max_cpu_loras']['value']} in memory"]
    yield from _flowed([*(items or ["none yet"]), *limits])
    if envs.ALLOW_RUNTIME_LORA_UPDATING.get() and not settings["lora_dir"]["value"]:
        yield "POST /v1/load_lora_adapter opens no folder: name some with --lora-dir"


def _predicted(setting: dict[str, Any]) -> Any:
    """The value; with its interval and the resource that binds, if it has one."""
    names = ("value", "low", "high", "bound")
    return {name: setting[name] for name in names} if "bound" in setting else setting["value"]


def _expectation(
    of_one: dict[str, Any], of_all: dict[str, Any], waited: dict[str, Any], num_users: dict[str, Any]
) -> Iterator[str]:
    users, items = num_users["value"], [f"1 user {_rate(of_one)}"]
    if users > 1:
        items.append(f"{users:,} users together {_rate(of_all)}")
    yield from _flowed(items)
    if (why := busy_machine(waited["value"])) is not None:
        yield from textwrap.wrap(why, WIDTH - len(INDENT))


def _rate(predicted: dict[str, Any]) -> str:
    rate = Estimate(*(predicted[name] for name in ("value", "low", "high")))
    return rate.text(f"bound by {predicted['bound']}", "tok/s")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _flowed(items: Iterable[str]) -> Iterator[str]:
    """Lines of items with dots between them. Each line is as full as possible."""
    line = ""
    for item in items:
        if line and len(INDENT) + len(line) + len(item) + 3 > WIDTH:
            yield line
            line = ""
        line = f"{line} · {item}" if line else item
    yield line


def _addresses(name: str, *, has_page: bool) -> tuple[str, str]:
    page = "   chat in the browser" if has_page else ""
    return f"{name}{page}   Ctrl-C stops", "API docs: /docs   metrics: /metrics   settings: /v1/config"


def _curl(address: Address, *, has_chat: bool, needs_key: bool) -> Iterator[str]:
    """The lines of a `curl` command that a person can paste."""
    path, body = ("chat/completions", QUESTION) if has_chat else ("completions", PROMPT)
    yield f"curl {address.url}/v1/{path} \\"
    if address.curl:
        yield f"{address.curl} \\"
    if needs_key:
        yield "-H 'Authorization: Bearer YOUR_KEY' \\"
    yield "-H 'Content-Type: application/json' \\"
    yield f"-d '{body}'"


def _labelled(label: str, lines: Iterable[str], style: Style, *colours: str) -> Iterator[str]:
    start = f"  {style(f'{label:<{LABEL_WIDTH}}', 'bold', *colours)} "
    for line in lines:
        yield start + line
        start = INDENT


def _print(lines: Iterable[str]) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
