"""`quire quality [MODEL] --text FILE [--against BASE]`: the loss of a format against the original, on a text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError

DESCRIPTION = """
Compares a model with its original on a text, over the whole vocabulary. The text is cut into windows of --context
tokens; every token but a window's first is predicted from those before it in the window.
"""
DEFINITIONS = """
perplexity      exp(mean of -ln p(next token))
ratio           perplexity / perplexity of the base, on the same tokens
KL              sum over all tokens v of p_base(v) ln(p_base(v) / p_model(v)), in nats, at each position: its mean and
                its 99th percentile over positions
same top token  share of positions at which both find the same token most likely
[a, b]          95 % confidence interval; windows count as independent, and are compared pairwise

docs/quantization.md says how to read them.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quality",
        help="compare quantized weights or KV caches with the original on a text",
        description=DESCRIPTION,
        epilog=DEFINITIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help=f"{_NAMES} of the model; none: the bundled demo model")
    add("--text", metavar="FILE", required=True, help="UTF-8 text, best of the kind the model is used for")
    add("--against", metavar="BASE", help=f"{_NAMES} of the original; none: MODEL without quantization")
    add("--quantization", "-q", type=_words, action="extend", metavar="FORMAT,..", help=_QUANTIZATION)
    add("--kv-cache-dtype", type=_words, action="extend", metavar="DTYPE,..", help="of the model; a row for each")
    add("--dtype", default="auto", help="of activations and unquantized weights; auto: the checkpoint's")
    add("--against-dtype", help="of the base; none: that of --dtype")
    add("--max-tokens", type=int, default=16_384, metavar="N", help="of the text that are read (default: %(default)s)")
    add("--context", type=int, default=1024, metavar="N", help="tokens of a window (default: %(default)s)")
    add("--num-threads", type=int, metavar="N", help="of the CPU kernels; none: physical cores allowed")
    add("--json", action="store_true", help="print JSON")
    add("--disable-tqdm", action=argparse.BooleanOptionalAction, default=False, help="no bars")
    parser.set_defaults(run=run)


_NAMES = "folder, hub id or GGUF file"
_QUANTIZATION = "how MODEL is quantized while it loads, as `serve` takes it, or none; a row for each"


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def run(args: argparse.Namespace) -> int:
    for name in ("max_tokens", "context"):
        if getattr(args, name) < 2:
            raise ConfigError("Too few tokens", value=getattr(args, name), expected="2 or more", param=name)
    from tqdm import tqdm

    from quire.quality import measure, report
    from quire.screen.start_display import shown_start

    common: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": args.context, "num_threads": args.num_threads}
    common |= {"max_num_batched_tokens": measure.STEP_TOKENS, "enable_prefix_caching": False}
    base = EngineConfig(model=args.against or args.model, dtype=args.against_dtype or args.dtype, **common)
    models = list(_models(EngineConfig(model=args.model, dtype=args.dtype, **common), args))
    if all(model == base for _, model in models):
        raise ConfigError(
            "The model would be compared with itself",
            fix="Name formats with --quantization or --kv-cache-dtype, or the original with --against",
        )
    if args.against is None and measure.is_quantized(base):
        raise ConfigError(
            "The checkpoint is quantized, and no original is named to compare it with",
            fix="Name the original: --against BASE",
            param="against",
        )
    text = measure.read_text(args.text, base, [model for _, model in models], args.context, args.max_tokens)
    with shown_start(is_quiet=args.disable_tqdm) as progress:
        loaded = measure.load(base, progress)
        measure.download(models[0][1], progress)
    total = text.num_predicted * len(models)
    with tqdm(total=total, unit="tok", disable=args.disable_tqdm or None, dynamic_ncols=True) as bar:
        rows = list(measure.measure(text, loaded.runner, models, bar.update))
    base_name = report.base_name(args.against or args.model, loaded)
    if args.json:
        print(json.dumps(measure.as_dict(text, base_name, rows), indent=2))
    else:
        print(report.text(text, base_name, Path(args.text).name, rows))
    return 0


def _models(plain: EngineConfig, args: argparse.Namespace) -> Iterable[tuple[str, EngineConfig]]:
    """The settings of a model for each pair of formats, with the name of its row."""
    for quantization, kv in product(args.quantization or ["none"], args.kv_cache_dtype or ["auto"]):
        name = quantization if quantization != "none" else Path(args.model or "").name or "unquantized"
        config = replace(plain, quantization=None if quantization == "none" else quantization, kv_cache_dtype=kv)
        yield name if kv == "auto" else f"{name}, KV {kv}", config
