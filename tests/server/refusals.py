"""Why a body is refused though its form is right."""

from __future__ import annotations

import re

# Reasons to refuse a body that no schema can express.
NOT_OF_THE_FORM = re.compile(
    "maximum context length|too long|min_tokens is greater|no token is left|chat template|"
    "twice as many tokens|too many continuations|exactly one constraint|cannot be used: |has no schema|"
    "nested too deeply|has no tokens|is not JSON|not among the tools|"
    "how its model writes reasoning"
)
