"""The parser of vLLM's scripts: their own flags, the flags of EngineArgs, and `--config FILE` with any of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from quire.cli.config_file import read_config_file
from quire.cli.flags import Parser
from quire.errors import ConfigError


class FlexibleArgumentParser(Parser):
    """Reads command lines as vLLM's does. `--config FILE` is a YAML file with flags as keys; the command line wins."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words, path = list(sys.argv[1:] if args is None else args), None
        if "--config" not in self._option_string_actions:
            words, path = self._take_config(words)
        if path is not None:
            namespace = argparse.Namespace() if namespace is None else namespace
            try:
                values = read_config_file(path, self, only_settings=False)
            except ConfigError as error:
                self.error(error.message)
            for action in self._actions:
                if action.dest in values:
                    action.required = False
                    setattr(namespace, action.dest, values[action.dest])
        return super().parse_args(words, namespace)

    def _take_config(self, words: list[str]) -> tuple[list[str], Path | None]:
        """The words without `--config FILE`, and the file; None: there is none."""
        places = [place for place, word in enumerate(words) if word == "--config" or word.startswith("--config=")]
        if not places:
            return words, None
        if len(places) > 1:
            self.error("--config is given twice")
        place = places[0]
        _, has_value, name = words[place].partition("=")
        end = place + (1 if has_value else 2)
        if end > len(words) or not (name := name or words[place + 1]):
            self.error("--config needs a file")
        return [*words[:place], *words[end:]], Path(name)
