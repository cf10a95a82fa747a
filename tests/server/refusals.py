"""Why a body is refused though the OpenAPI document allows it: for what JSON Schema cannot say."""

from __future__ import annotations

import re

# What a message says -> why no schema can say it.
REASONS = {
    "maximum context length|tokens can hold": "the tokenizer decides how many tokens a text has",
    "has no tokens": "the same",
    "no token is left": "the same, for what several fields leave of the vocabulary",
    "contains a string that is too long": "limits of strings are limits of bytes",
    "is not JSON": "the JSON of a text in JSON",
    "min_tokens is greater": "two numbers are compared",
    "twice as many tokens": "two numbers are compared",
    "token budget would be smaller": "a number is compared with another one, or with that of now",
    "is below the fastest step": "a duration as text is compared with one",
    "form is given do not work with beam search": "what several fields say together about calls",
    "too many continuations": "the length of a list is multiplied",
    "not among the tools": "a name in one place has to be in another one",
    "nested too deeply": "depth: each level would have to be written",
    "chat template": "the code of the template decides",
    r"structured_outputs\.\w+ cannot be used: ": "whether some text fits, and in which keywords",
}


def reasons_of(message: str) -> list[str]:
    """Which of the reasons an error gives."""
    return [reason for reason in REASONS if re.search(reason, message)]
