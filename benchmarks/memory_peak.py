"""The peak of resident memory from start to a full KV cache, against the bytes of weights and KV cache.

Each format is loaded in its own process, which then computes prompts until the whole KV cache has been in use. The peak
is VmHWM: anonymous memory and pages of mapped files, including the checkpoint. The memory of the interpreter and its
libraries is read after the imports, before anything is loaded.

    python benchmarks/memory_peak.py MODEL [--kv-bytes 536870912] [--save HARDWARE]

--save writes benchmarks/results/HARDWARE/memory_peak_DATE.md and .json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from quire.measure import report

FORMATS = ("bfloat16", "int8", "int4", "fp8")
MIB = 1 << 20
RUN = """
import json, sys
import torch
from quire import LLM, SamplingParams

def resident(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return 1024 * int(line.split()[1])

torch.zeros(1) + 1
interpreter = resident("VmRSS")
model, name, kv_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = LLM(
    model,
    dtype="bfloat16",
    quantization=None if name == "bfloat16" else name,
    max_model_len=1024,
    kv_cache_memory_bytes=kv_bytes,
    enable_prefix_caching=False,
)
plan = llm.resolved
prompts = [{"prompt_token_ids": [1] * 1000} for _ in range(plan.memory.num_blocks * plan.model.block_size // 1024)]
llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
planned = {"weights": plan.memory.weight_bytes, "kv": plan.memory.kv_cache_bytes}
found = {"interpreter": interpreter, **planned, "peak": resident("VmHWM")}
print(json.dumps(found))
"""


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("Peak of resident memory over weights and KV cache", result),
        "- MiB. The whole KV cache has been in use. The last two columns: the peak divided by weights and KV cache,",
        "  without and with the memory of Python, torch and the other libraries.",
        "",
        "| | weights | KV cache | interpreter | peak | over both | with the interpreter |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in result["formats"].items():
        both = found["weights"] + found["kv"]
        cells = [f"{found[key] / MIB:.0f}" for key in ("weights", "kv", "interpreter", "peak")]
        cells += [f"{(found['peak'] - found['interpreter']) / both:.2f}", f"{found['peak'] / both:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--kv-bytes", type=int, default=512 * MIB)
    arguments = parser.parse_args()
    formats = {}
    for name in FORMATS:
        command = [sys.executable, "-c", RUN, arguments.model, name, str(arguments.kv_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{name}: {done.stderr}")
        formats[name] = json.loads(done.stdout.splitlines()[-1])
    result = {**report.environment("python", "benchmarks/memory_peak.py"), "formats": formats}
    report.publish(__file__, arguments.save, "memory_peak", result, markdown(result))


if __name__ == "__main__":
    main()
