"""`quire quantize [MODEL] --to FORMAT OUT`: writes a checkpoint in a standard layout."""

from __future__ import annotations

import argparse
from typing import Any

from quire.checkpoint_writer.formats import FORMATS
from quire.errors import ConfigError

EPILOG = """
formats:
{formats}

A run that was interrupted is continued by the same command. docs/quantization.md has measured quality.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="write a quantized checkpoint of a model",
        description="Writes a quantized checkpoint of MODEL to the folder OUT, a layer at a time.",
        epilog=EPILOG.format(formats="\n".join(f"  {name:<5} {what}" for name, what in FORMATS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="folder or hub id of the model; none: the bundled demo model")
    add("out", metavar="OUT", help="folder to write")
    add("--to", required=True, choices=FORMATS, help="the format")
    add("--group-size", type=int, default=128, metavar="N", help="in-features that share a scale (default: 128)")
    add("--act-order", action="store_true", help="gptq: round columns with large inputs first, in groups as they lie")
    add("--calibration", metavar="FILE", help="UTF-8 text for gptq and awq; none: the model writes its own")
    add("--calibration-windows", type=int, default=64, metavar="N", help="pieces of it (default: 64)")
    add("--calibration-length", type=int, default=512, metavar="N", help="tokens of a piece (default: 512)")
    add("--seed", type=int, default=0, help="of the text the model writes (default: 0)")
    add("--num-threads", type=int, metavar="N", help="of the CPU kernels; none: physical cores allowed")
    add("--disable-tqdm", action=argparse.BooleanOptionalAction, default=False, help="no bars")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.group_size not in (32, 64, 128, 256):
        raise ConfigError(
            "Illegal group size", value=args.group_size, expected="32, 64, 128 or 256", param="group_size"
        )
    for name in ("calibration_windows", "calibration_length"):
        if getattr(args, name) < 1:
            raise ConfigError(
                "Too little calibration text", value=getattr(args, name), expected="1 or more", param=name
            )
    from tqdm import tqdm

    from quire.checkpoint_writer.run import Options, download, quantize
    from quire.resolve import shown_bytes
    from quire.screen.start_display import shown_start

    names = (
        "model",
        "to",
        "out",
        "group_size",
        "act_order",
        "calibration",
        "calibration_windows",
        "calibration_length",
    )
    options = Options(**{name: getattr(args, name) for name in (*names, "seed", "num_threads")})
    with shown_start(is_quiet=args.disable_tqdm) as progress:
        download(options, progress)
    hidden = args.disable_tqdm or None
    with tqdm(unit="shard", disable=hidden, dynamic_ncols=True) as bar:

        def tick(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        output = quantize(options, bar.set_postfix_str, tick, use_tqdm=hidden is None)
    print(f"{output.folder}: {shown_bytes(output.num_bytes())} of weights, {args.to}")
    return 0
