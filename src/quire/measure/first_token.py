"""Times one start in its own process: `python -m quire.measure.first_token` reads an EngineConfig as JSON.

It prints one JSON object: seconds of each phase from the start of the process to the first token of a request.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec

from quire.errors import QuireError


def measure() -> dict[str, Any]:
    """The seconds of a start and of its phases.

    The first line of the input is the parent's clock at the start, in seconds. The second line is the config.
    """
    started = float(sys.stdin.readline())  # time.monotonic is one clock for all processes
    phases: dict[str, float] = {}
    last = started

    def mark(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        phases[name] = phases.get(name, 0.0) + now - last
        last = now

    current = ""

    def progress(phase: str, fraction: float, detail: str) -> None:
        nonlocal current
        if phase != current:
            mark(current or "config and memory plan")
            current = phase

    mark("interpreter")
    from quire.config import EngineConfig
    from quire.engine.start import start_engine
    from quire.entry.launch import open_model
    from quire.entry.offline import OfflineRunner
    from quire.frontend.output_processor import OutputProcessor
    from quire.sampling_params import SamplingParams

    config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    mark("imports")
    parts = open_model(config, lambda phase, fraction, detail: None)
    mark("tokenizer")
    engine = start_engine(
        config,
        parts.model_folder,
        is_server=False,
        progress=progress,
        drafter_folder=parts.model_config.drafter_folder,
    )
    mark(current)
    inputs = parts.input_processor.with_max_model_len(engine.resolved.model.max_model_len)
    request = inputs.process("first", {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, ignore_eos=True))
    OfflineRunner(engine.core, OutputProcessor(parts.tokenizer)).run([request])
    mark("first token")
    return {"seconds": last - started, "phases": phases}


def main() -> None:
    """Exit code 1 with one line on standard error if the engine does not start."""
    try:
        print(json.dumps(measure()))
    except QuireError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
