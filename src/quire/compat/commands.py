"""vLLM's commands and modules that do not exist here, with the alternative."""

from __future__ import annotations

# command -> (why, fix)
ABSENT_COMMANDS: dict[str, tuple[str, str]] = {
    "launch": ("there is no server without an engine", "Use `quire serve`"),
    "download-kernels": ("kernels come with the package", "Nothing to do"),
    "preload": ("weights are not shared between servers", "Use `quire serve`"),
    "snapshot": ("processes are not frozen to disk", "Use `quire serve`"),
}


def absent_command(name: str) -> str | None:
    """The reason why `quire NAME` does not exist, in one line; None: vLLM has no such command either."""
    if name not in ABSENT_COMMANDS:
        return None
    why, fix = ABSENT_COMMANDS[name]
    return f"`quire {name}` does not exist: {why}. {fix}."
