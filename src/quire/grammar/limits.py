"""Bounds on what a grammar may cost, the same where it is checked and where it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """llguidance's bounds: they count work, so a grammar that passes on one machine passes on every machine.

    llguidance's documentation gives the counters' speeds: 50,000 per ms for `initial_lexer_fuel`, 14,000 for
    `step_lexer_fuel`. So a mask takes about 15 ms at most, and the lexer of a grammar about 20 ms. The parser's part
    grows with the text: on 2 shared cores an enum of 50,000 texts (0.7 MB) took 150 ms, an object of 5,000 keys 300 ms.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False
    )
