"""How calls must be written whose arguments are to follow their schemas (`strict`): structural tags for a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrictFormat:
    """How a format's calls begin: the text is free up to the trigger, and a call from there on.

    Args:
        trigger: of calls, which stands for nothing else.
        behind: what is between the trigger and the arguments, with NAME for the tool.
        end: what is behind the arguments.
    """

    trigger: str
    behind: str
    end: str

    def tag(self, schemas: Mapping[str, Any]) -> dict[str, Any]:
        """The structural tag for tools. `schemas`: name -> schema of the arguments."""
        structures = [
            {
                "begin": self.trigger + self.behind.replace("NAME", json.dumps(name, ensure_ascii=False)[1:-1]),
                "schema": schema,
                "end": self.end,
            }
            for name, schema in schemas.items()
        ]
        return {"structures": structures, "triggers": [self.trigger]}


# Not here: formats whose arguments are no JSON (glm45, pythonic, qwen3), whose calls may begin without a tag (granite,
# llama3_json), have a number in them (kimi_k2) or stand in messages (openai).
STRICT_FORMATS = {
    "deepseek_v3": StrictFormat(
        "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"
    ),
    "deepseek_v31": StrictFormat("<｜tool▁call▁begin｜>", "NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "hermes": StrictFormat("<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    "mistral": StrictFormat("[TOOL_CALLS]", "NAME[ARGS]", ""),
    "phi4_mini_json": StrictFormat("functools[", '{"name": "NAME", "arguments": ', "}]"),
}
