"""llguidance's own objections to a grammar or a schema."""

from __future__ import annotations

import json
from typing import Any

from quire.grammar.limits import parser_limits


def objections(grammar: str) -> list[str]:
    """All objections to a grammar in llguidance's own form."""
    from llguidance import LLMatcher

    _, found = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    return found


def objections_to_schema(schema: dict[str, Any]) -> list[str]:
    """All objections to a schema. Raises ValueError if it cannot be read: half of a surrogate pair, NaN."""
    from llguidance import LLMatcher

    return objections(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def contradicts_itself(schema: dict[str, Any]) -> bool:
    """Whether nothing satisfies a schema, as far as its keywords for numbers and strings say. It takes 0.1 ms.

    False for a grammar that cannot be read, which is refused as a whole.
    """
    try:
        return any(each.startswith("Unsatisfiable") for each in objections_to_schema(schema))
    except ValueError:
        return False
