"""Calibrations kept for the next start: one small file per machine, build, model and form.

A file is used only if this user owns it, nobody else can write to it or its folder, and its key and all its numbers
are valid. Otherwise the engine measures again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from quire.cost.calibrate import Fit
from quire.cost.collectives import Link, Links
from quire.cost.correct import MAX_COLD_SECONDS, MAX_RATIO
from quire.cost.overhead import MAX_SECONDS, Overhead
from quire.cost.step_time import FITTED, Constants
from quire.logs import get_logger
from quire.private_cache import check_private, digest, open_private

logger = get_logger(__name__)

MAX_FILE_BYTES = 65_536
MAX_LINK_SECONDS = 60.0  # of an exchange, and of a byte
MAX_SIZE = 64  # bits of the number of a step's tokens


class CalibrationFile:
    """The file of one model on one machine.

    Args:
        folder: the folder of all calibrations; None: they are not kept.
        key: everything that a calibration depends on; JSON.
    """

    def __init__(self, folder: Path | None, key: Mapping[str, Any]) -> None:
        self._key = dict(key)
        self.path = folder and folder / f"{digest(json.dumps(self._key, sort_keys=True))[:32]}.json"

    def read(self) -> Fit | None:
        """The fit that was written for this key; None if there is no valid one."""
        if self.path is None:
            return None
        try:
            check_private(self.path.parent)
            with open_private(self.path) as file:
                found = json.loads(file.read(MAX_FILE_BYTES))
            if found["key"] != self._key:
                raise ValueError("it is of another machine, build or model")
            numbers = [float(found["constants"][name]) for name in FITTED]
            spread = float(found["spread"])
            if not all(math.isfinite(number) and number > 0 for number in numbers) or numbers[-1] < 1:
                raise ValueError("its constants are impossible")
            links = Links(*(Link(*map(float, link)) for link in found["constants"]["links"]))
            if not all(0 <= each <= MAX_LINK_SECONDS for link in links for each in link):
                raise ValueError("its links are impossible")
            if not 0 < spread <= MAX_RATIO:
                raise ValueError("its spread is impossible")
            factors = {int(size): float(factor) for size, factor in found["factors"].items()}
            if not all(0 <= size <= MAX_SIZE and 1 / MAX_RATIO <= each <= MAX_RATIO for size, each in factors.items()):
                raise ValueError("its factors are impossible")
            if not 0 <= (cold := float(found["cold"])) <= MAX_COLD_SECONDS:
                raise ValueError("its time after a pause is impossible")
            overhead = None
            if found["overhead"] is not None:
                given = [float(found["overhead"][field.name]) for field in fields(Overhead)]
                if not all(0 <= seconds <= MAX_SECONDS for seconds in given):
                    raise ValueError("its overhead of a request is impossible")
                overhead = Overhead(*given)
            return Fit(Constants(*numbers, links=links), spread, factors, cold, overhead)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.info("the calibration in %s is not used: %s", self.path, error)
            return None

    def write(self, fit: Fit) -> None:
        """Keep a calibration. A failure is only logged: the next start measures again."""
        if self.path is None:
            return
        text = json.dumps({"key": self._key, **asdict(fit)}, indent=1)
        scratch = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.path.parent)
            with suppress(FileNotFoundError):
                scratch.unlink()
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w") as file:
                file.write(text)
            scratch.replace(self.path)
        except OSError as error:
            logger.info("the calibration is not kept: %s", error)
