"""One small tokenizer per kind of decoder, built in memory."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SAMPLE = "the quick brown fox jumps over the lazy dog; déjà vu 你好 😀 " * 20
SPECIAL = [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "<｜begin▁of▁text｜>")]
PLAIN_ADDED = AddedToken("<tool call>", special=False, normalized=False)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([PLAIN_ADDED])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return _with_added(tokenizer)


def _sentencepiece_vocab() -> dict[str, int]:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁the", "▁quick", "er", "你", "▁a", "�"]
    pieces += list("abcdefghijklmnopqrstuvwxyz.,!<>0x")
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def _sentencepiece() -> Tokenizer:
    return Tokenizer(
        models.BPE(vocab=_sentencepiece_vocab(), merges=[("e", "r")], unk_token="<unk>", byte_fallback=True)
    )


def llama() -> Tokenizer:
    """Llama 2, Mistral: a leading space is added to the text and taken off again."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _with_added(tokenizer)


def gemma() -> Tokenizer:
    """Gemma: no leading space."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_added(tokenizer)


def metaspace() -> Tokenizer:
    """T5 and others: the decoder itself knows about the first token."""
    tokenizer = _sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_added(tokenizer)


def word_piece() -> Tokenizer:
    """BERT: a space before every word, and punctuation cleaned up."""
    words = ["[UNK]", "the", "quick", "##er", "##s", "fox", ".", ",", "n't", "do", "é"]
    model = models.WordPiece(vocab={word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return _with_added(tokenizer)


def suffix() -> Tokenizer:
    """GPT-1, XLM: `</w>` ends a word; the last token of a text gets no space."""
    pieces = ["<unk>", "t", "h", "e", "the</w>", "fox</w>", "s</w>", "é</w>"]
    model = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.BPEDecoder()
    return _with_added(tokenizer)


def no_decoder() -> Tokenizer:
    """Tokens joined by spaces."""
    words = ["[UNK]", "the", "quick", "fox"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_added(tokenizer)


def regex_replace() -> Tokenizer:
    """A decoder step that is not known: spaces are squeezed in the whole text."""
    tokenizer = gemma()
    squeeze = decoders.Replace(Regex(" +"), " ")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), squeeze])
    return tokenizer


BYTE_KINDS = ("byte_level", "llama", "gemma", "metaspace")
UNUSUAL_KINDS = ("word_piece", "suffix", "no_decoder", "regex_replace")


@cache
def build(kind: str) -> Tokenizer:
    """The tokenizer of that name."""
    builder = globals()[kind]
    result: Tokenizer = builder()
    return result
