"""Fill in the middle: prompts of models that were trained to write what stands between two texts."""

from __future__ import annotations

from quire.frontend.tokenizer import Tokenizer

# By the special tokens that a vocabulary has. Sources: the models' cards.
_FORMATS: dict[tuple[str, ...], str] = {
    # Qwen2.5-Coder and its successors, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"): "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>",
    # StarCoder, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): "<fim_prefix>{}<fim_suffix>{}<fim_middle>",
    # DeepSeek-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"): "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>",
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
