"""Measures the loss of quality of each format with the demo model, and prints the table of docs/quantization.md.

    python benchmarks/quality.py [--questions 200] [--max-tokens 16384] [--gguf FILE ...] > table.md

`quire quality --help` defines all columns except the last. The base is the demo model in float32. The text is chats
about the entries of `quire.demo.data`, drawn with their own seed: the facts of the training data in other words.
`exact answers` counts the greedy answers to `--questions` questions that equal the entry word for word. `quire
quantize` writes the checkpoints with text that the model generates. GGUF files of the demo model, which Quire does not
write, give further rows. The header names their quantization (general.file_type).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf

import quire.demo
from quire import LLM, SamplingParams
from quire.checkpoint_writer.run import Options, quantize
from quire.config import EngineConfig
from quire.demo.data import Entry, chats, clean_entries, questions
from quire.gguf.file import open_gguf
from quire.quality import measure
from quire.quality.summary import Estimate, summarize
from quire.resolve import shown_bytes

CONTEXT = 1024
ON_LOAD: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "`--quantization int8`": {"quantization": "int8"},
    "`--quantization fp8`": {"quantization": "fp8"},
    "`--quantization int4`": {"quantization": "int4"},
    "`--kv-cache-dtype fp8`": {"kv_cache_dtype": "fp8"},
    "`--kv-cache-dtype fp8_e5m2`": {"kv_cache_dtype": "fp8_e5m2"},
    "`--kv-cache-dtype int8`": {"kv_cache_dtype": "int8"},
}
WRITTEN: dict[str, dict[str, Any]] = {
    "`quire quantize --to int8`": {"to": "int8"},
    "`quire quantize --to fp8`": {"to": "fp8"},
    "`quire quantize --to int4`": {"to": "int4"},
    "`quire quantize --to awq`": {"to": "awq"},
    "`quire quantize --to gptq`": {"to": "gptq"},
    "`quire quantize --to gptq --act-order`": {"to": "gptq", "act_order": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=16_384)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--gguf", nargs="+", default=[], metavar="FILE", help="files of the demo model: the last rows")
    parser.add_argument("--rows", type=int, nargs=2, default=(0, 99), metavar="N", help="only the rows N to M")
    args = parser.parse_args()
    entries = clean_entries()
    common: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": CONTEXT, "num_threads": args.num_threads}
    files = [(gguf_row(file), {"model": file}) for file in args.gguf]
    with tempfile.TemporaryDirectory() as folder:
        text_path = Path(folder) / "text"
        text_path.write_text("".join(chats(entries, random.Random(11))))
        base_config = EngineConfig(dtype="float32", **common)
        models = [EngineConfig(**options) for _, options in files]
        text = measure.read_text(str(text_path), base_config, models, CONTEXT, args.max_tokens)
        base = measure.load(base_config, _silent).runner
        print("| | weights | perplexity ratio | KL mean (nats) | KL 99 % | same top token | exact answers |")
        print("|---|---|---|---|---|---|---|")
        for name, options in [*(ON_LOAD | WRITTEN).items(), *files][slice(*args.rows)]:
            print(name, file=sys.stderr)
            if name in WRITTEN:
                out = Path(folder) / str(len(list(Path(folder).iterdir())))
                settings = Options(model=None, out=str(out), num_threads=args.num_threads, **options)
                quantize(settings, lambda text: None, lambda count, total: None, use_tqdm=False)
                options = {"model": str(out)}
            runner = measure.load(EngineConfig(**common | options), _silent).runner
            quality = summarize(measure.compare_runners(text, base, runner))
            cells = [
                name,
                shown_bytes(runner.model.weight_bytes()),
                _shown(quality.perplexity_ratio, 4),
                _shown(quality.kl_mean, 5),
                f"{quality.kl_p99:.4f}",
                f"{100 * quality.top_token_agreement.value:.2f} %",
                f"{exact_answers(entries, args.questions, args.num_threads, options)} of {args.questions}",
            ]
            print("|", " | ".join(cells), "|", flush=True)


def gguf_row(file: str) -> str:
    """The name of a file's row, for example `GGUF Q4_K_M`. The type is that of the header, also for mixed tensors."""
    file_type = gguf.LlamaFileType(open_gguf(file).metadata["general.file_type"])
    return f"GGUF {file_type.name.partition('_')[2]}"  # of MOSTLY_Q4_K_M, ALL_F32


def exact_answers(entries: list[Entry], count: int, num_threads: int | None, options: dict[str, Any]) -> int:
    """The number of greedy answers that equal the entry word for word."""
    llm = LLM(**{"model": str(quire.demo.path())} | options, num_threads=num_threads, kv_cache_memory_bytes=1 << 26)
    asked = questions(entries, count)
    messages = [[{"role": "user", "content": question}] for question, _ in asked]
    outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=150), use_tqdm=False)
    return sum(
        output.outputs[0].text.strip() == entry.answer for output, (_, entry) in zip(outputs, asked, strict=True)
    )


def _shown(estimate: Estimate, digits: int) -> str:
    assert estimate.interval is not None
    low, high = estimate.interval
    return f"{estimate.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _silent(phase: str, fraction: float, detail: str) -> None:
    """Show no progress."""


if __name__ == "__main__":
    main()
