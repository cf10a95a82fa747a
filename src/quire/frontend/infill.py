"""Fill in the middle: prompts of models that were trained to write what stands between two texts."""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.tokenizer import Tokenizer

_CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>")
_MARK = "☺"  # one token, of a text that is encoded behind it as it would be behind another one
# By the special tokens that a vocabulary has. Sources: the models' cards.
_FORMATS: dict[tuple[str, ...], str] = {
    # Qwen2.5-Coder and its successors, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"): "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>",
    # StarCoder, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): "<fim_prefix>{}<fim_suffix>{}<fim_middle>",
    # DeepSeek-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"): "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>",
    # SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"): "<fim-prefix>{}<fim-suffix>{}<fim-middle>",
    # Seed-Coder: the suffix comes first
    ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"): "<[fim-suffix]>{1}<[fim-prefix]>{0}<[fim-middle]>",
    # CodeLlama
    _CODE_LLAMA: "▁<PRE>{}▁<SUF>{}▁<MID>",
    # Codestral: the suffix comes first
    ("[PREFIX]", "[SUFFIX]"): "[SUFFIX]{1}[PREFIX]{0}",
}


def infill_format(tokenizer: Tokenizer) -> str | None:
    """A format of the text before and the text after; None: the model knows none."""
    return next(
        (
            form
            for tokens, form in _FORMATS.items()
            if all(tokenizer.token_to_id(token) is not None for token in tokens)
        ),
        None,
    )


def infill_prompt(encode: Callable[[str, bool], list[int]], form: str, before: str, after: str) -> str | list[int]:
    """The prompt between two texts, by the model's format: text, or token ids.

    CodeLlama's tokenizer begins a text with a space, also behind a special token. The text after must have none.

    Args:
        encode: see Tokenizer.encode.
    """
    if form != _FORMATS[_CODE_LLAMA]:
        return form.format(before, after)
    first, second, last = _CODE_LLAMA
    marked = encode(_MARK + after, False)[len(encode(_MARK, False)) :]
    return [*encode(first + before + second, True), *marked, *encode(last, False)]
