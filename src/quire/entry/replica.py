"""The engine process of a replica that Ray has placed on some machine. It finds the model there.

Ray starts it as `python -m quire.entry.replica RANKS`, with an EngineLaunch as one line of JSON on its standard input.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from quire.engine import process
from quire.engine.nodes import checkpoint
from quire.engine.rank_spawn import die_with_parent
from quire.entry.launch import find_model
from quire.errors import ConfigError
from quire.messages import EngineLaunch, Progress


def find(launch: EngineLaunch, progress: Progress) -> tuple[Path, Path | None]:
    """The folders of the model and of its drafter; missing files are downloaded. Raises ConfigErrors."""
    config, is_dummy = launch.config, launch.config.load_format == "dummy"
    folder, _, model = find_model(config, progress, weights=not is_dummy)
    if (found := checkpoint(folder, is_dummy=is_dummy)) != launch.checkpoint:
        raise ConfigError(
            f"The model on {platform.node()}, where Ray has placed replica {launch.engine_index}, is another one",
            value=f"{folder}: {found}",
            expected=f"{launch.checkpoint}, as on the server's machine",
            fix="Copy the files, or name a repository of the hub and its --revision",
            param="model",
        )
    return folder, model.drafter_folder


if __name__ == "__main__":
    die_with_parent()  # Ray may end it at any time
    sys.exit(process.main(int(sys.argv[1]), find))
