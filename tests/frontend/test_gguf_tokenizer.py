"""Tokenizers from GGUF metadata: the ids and texts of the tokenizer.json the file was made from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

import quire.demo
from quire.config import EngineConfig
from quire.entry.launch import open_model
from quire.errors import ConfigError
from quire.frontend import gguf_tokenizer
from quire.frontend.gguf_tokenizer import PRE_TOKENIZERS
from quire.frontend.tokenizer import Tokenizer
from tests.examples import examples
from tests.gguf.raw import ARRAY, BOOL, STRING, U32, Raw, array, number, pair, text
from tests.gguf.writing import add_tokenizer

ODD = (
    "",
    " ",
    "\n",
    "\t\r\n \n",
    "hello world",
    "Hello  World   and    more",
    " leading",
    "trailing ",
    "don't WE'LL they've I'm 'S",
    "1 12 123 1234 12345 ½ ² Ⅷ",
    "a\u0301 é e\u0301 ﬁ Å",
    "日本語のテキスト、と漢字。",
    "Привет мир שלום مرحبا",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f600",
    "zero\u200bwidth\u00a0nbsp\u2028line",
    "def f(x):\n    return x ** 2  # tail\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|> <|im_end|>x<|endoftext|>",
    "<|im_start|",
    "a<b>c</s><s>[INST]",
    "\x00\x01\x7f\ufffd",
    "x" * 300,
    "▁underscore▁ _plain_",
    "https://example.org/?q=1&b=%20#frag",
)
WORDS = (
    "the quick brown fox jumps over the lazy dog. Don't panic! 12345 67 8\nこんにちは 世界 naïve café über straße\n"
    "def main():\n    print('hello')\n\nfor i in range(10):  pass\n"
)


def written(path: Path, original: Path, pre: str, vocab_size: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, original, pre, vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@cache
def demo() -> Tokenizer:
    return Tokenizer.from_folder(quire.demo.path("target"))


@pytest.fixture(scope="session")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("gguf")
    return Tokenizer.from_folder(written(folder / "demo.gguf", quire.demo.path("target"), "llama-bpe", 4096))


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--tokenizer=~/demo.gguf`, which no shell expands."""
    written(tmp_path / "demo.gguf", quire.demo.path("target"), "llama-bpe", 4096)
    monkeypatch.setenv("HOME", str(tmp_path))
    parts = open_model(EngineConfig(tokenizer="~/demo.gguf"), lambda *report: None)
    assert parts.tokenizer is not None
    assert parts.tokenizer.encode("hello world") == demo().encode("hello world")


@pytest.mark.parametrize("odd", ODD)
def test_demo_ids_and_text(odd: str, demo_gguf: Tokenizer) -> None:
    ids = demo().encode(odd)
    assert demo_gguf.encode(odd) == ids
    for skip in (True, False):
        assert demo_gguf.decode(ids, skip_special_tokens=skip) == demo().decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(300))
@given(st.text(max_size=60) | st.lists(st.sampled_from(ODD), max_size=4).map("".join))
def test_demo_ids_of_any_text(demo_gguf: Tokenizer, any_text: str) -> None:
    assert demo_gguf.encode(any_text) == demo().encode(any_text)


def test_demo_special_tokens_and_template(demo_gguf: Tokenizer) -> None:
    assert demo_gguf.special_token_ids == demo().special_token_ids
    assert demo_gguf.eos_token_id == demo().eos_token_id
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <|im_end|>"}]
    expected = demo().apply_chat_template(messages, add_generation_prompt=True)
    assert demo_gguf.apply_chat_template(messages, add_generation_prompt=True) == expected


# As in the models' tokenizer.json, independently of the product's code.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)],
    "gpt-2": [pre_tokenizers.ByteLevel(False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(CL100K.replace("DIGITS", r"\p{N}")), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ],
    "dbrx": [
        pre_tokenizers.Split(Regex(CL100K.replace("DIGITS", r"\p{N}{1,3}")), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ],
    "deepseek-coder": [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
        pre_tokenizers.Split(Regex("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ],
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_models(pre: str, tmp_path: Path) -> None:
    """A vocabulary trained with the pre-tokenizer of a family, with tokens of all types behind it."""
    original = tokenizers.Tokenizer(models.BPE())
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    original.pre_tokenizer = pre_tokenizers.Sequence(ORIGINALS[pre])
    original.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator([WORDS, *ODD] * 3, trainer)
    original.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    original.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    original.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    size = original.get_vocab_size()
    found = Tokenizer.from_folder(written(tmp_path / "m.gguf", tmp_path, pre, size + 5))
    for odd in (*ODD, WORDS, "<think> x</think><|im_start|>"):
        ids = original.encode(odd).ids
        assert found.encode(odd) == ids, odd
        assert found.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="session")
def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's kind of tokenizer.json: BPE over ▁, bytes for other text."""
    original = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False, max_token_length=12)
    original.train_from_iterator([WORDS, *ODD[:12]] * 4, trainer)
    content = json.loads(original.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def sentencepiece_gguf(path: Path, original: tokenizers.Tokenizer, **metadata: bool) -> Path:
    """Scores fall from merge to merge, as the converter takes them from a sentencepiece model."""
    model = json.loads(original.to_str())["model"]
    ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(model["merges"])))}
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
    writer.add_token_types([2, 3, 3] + [6 if token.startswith("<0x") else 1 for token in tokens[3:]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_sentencepiece_models(sentencepiece_like: tokenizers.Tokenizer, tmp_path: Path) -> None:
    found = Tokenizer.from_folder(sentencepiece_gguf(tmp_path / "m.gguf", sentencepiece_like))
    for odd in (*ODD, WORDS, "</s> x<s>y"):
        ids = sentencepiece_like.encode(odd).ids
        assert found.encode(odd, add_special_tokens=False) == ids, odd
        assert found.encode(odd) == [1, *ids], "sentencepiece models begin with BOS"
        assert found.backend.decode(ids) == sentencepiece_like.decode(ids)


def test_without_bos_and_prefix(sentencepiece_like: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """Gemma's kind: no ▁ is put before the text."""
    path = sentencepiece_gguf(tmp_path / "m.gguf", sentencepiece_like, add_bos_token=False, add_space_prefix=False)
    found = Tokenizer.from_folder(path)
    plain = tokenizers.Tokenizer.from_str(sentencepiece_like.to_str())
    plain.normalizer = normalizers.Replace(" ", "▁")
    for odd in ODD:
        assert found.encode(odd) == plain.encode(odd).ids
    ids = found.encode(" the dog")
    assert found.decode(ids) == " the dog"


def test_runs_of_spaces_that_are_tokens(tmp_path: Path) -> None:
    """Gemma's files spell them with real spaces, as a user's own: they are found before spaces become ▁."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁b", "  ", "   ", "\n\n"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * 3 + [-3.0, -4.0, -5.0, -6.0] + [-1000.0] * 3)
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 4, 4, 4])
    writer.add_bool("tokenizer.ggml.add_space_prefix", False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = Tokenizer.from_folder(tmp_path / "m.gguf")
    for cut in (["a", "▁b"], ["a", "  ", "b"], ["   ", "a", "   ", "▁b", "\n\n", "b"]):
        ids, written_out = [tokens.index(token) for token in cut], "".join(cut).replace("▁", " ")
        assert found.encode(written_out, add_special_tokens=False) == ids
        assert found.decode(ids) == written_out


@pytest.mark.parametrize("limit", ["_MAX_SPLIT_CHARS", "_MAX_MERGES"])
def test_sentencepiece_tokens_that_take_too_much(
    limit: str, sentencepiece_like: tokenizers.Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand tokens of a thousand characters, each within its own limit, would take gigabytes of halves."""
    path = sentencepiece_gguf(tmp_path / "m.gguf", sentencepiece_like)
    monkeypatch.setattr(gguf_tokenizer, limit, 100)
    with pytest.raises(ConfigError, match="its tokens are"):
        Tokenizer.from_folder(path)


def test_bos_of_llama_3(tmp_path: Path) -> None:
    """Llama 3's files say by the pre-tokenizer's name that a prompt begins with BOS."""
    folder = quire.demo.path("target")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
    with_bos = Tokenizer.from_folder(written(tmp_path / "a.gguf", tmp_path, "llama-bpe", 4096))
    without = Tokenizer.from_folder(written(tmp_path / "b.gguf", tmp_path, "smaug-bpe", 4096))
    assert with_bos.encode("x") == [0, *without.encode("x")]
    assert with_bos.encode("x", add_special_tokens=False) == without.encode("x")


def test_every_pattern_cuts_text_and_loses_nothing() -> None:
    for name, pre in PRE_TOKENIZERS.items():
        cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns])
        for odd in ODD:
            pieces = [piece for piece, _ in cuts.pre_tokenize_str(odd)]
            assert "".join(pieces) == odd, name
        assert len(cuts.pre_tokenize_str(WORDS)) > 20, name


TOKENS = pair("tokenizer.ggml.tokens", ARRAY, array(STRING, text("a") + text("b") + text("ab"), 3))
MERGES = pair("tokenizer.ggml.merges", ARRAY, array(STRING, text("a b"), 1))
GPT2, LLAMA = (pair("tokenizer.ggml.model", STRING, text(kind)) for kind in ("gpt2", "llama"))
BROKEN = {
    "no tokenizer": [],
    "no tokens": [GPT2, MERGES],
    "no merges": [GPT2, TOKENS],
    "tokens that are numbers": [GPT2, MERGES, pair("tokenizer.ggml.tokens", ARRAY, array(U32, number("I", 1), 1))],
    "unknown kind": [pair("tokenizer.ggml.model", STRING, text("rwkv")), TOKENS],
    "kind that is a number": [pair("tokenizer.ggml.model", U32, number("I", 1)), TOKENS],
    "unknown pre-tokenizer": [GPT2, TOKENS, MERGES, pair("tokenizer.ggml.pre", STRING, text("nonesuch"))],
    "merge of what is no token": [
        GPT2, TOKENS, pair("tokenizer.ggml.merges", ARRAY, array(STRING, text("a c"), 1))
    ],
    "merge without two parts": [GPT2, TOKENS, pair("tokenizer.ggml.merges", ARRAY, array(STRING, text("ab"), 1))],
    "too few types": [GPT2, TOKENS, MERGES, pair("tokenizer.ggml.token_type", ARRAY, array(U32, number("I", 1), 1))],
    "scores that are texts": [
        LLAMA, TOKENS, pair("tokenizer.ggml.scores", ARRAY, array(STRING, text("1") * 3, 3))
    ],
    "a token of a megabyte": [
        LLAMA, pair("tokenizer.ggml.tokens", ARRAY, array(STRING, text("a" * (1 << 20)), 1))
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(Raw(pairs=BROKEN[name]).build())
    with pytest.raises(ConfigError, match="--tokenizer"):
        Tokenizer.from_folder(path)


def test_a_small_vocabulary_works(tmp_path: Path) -> None:
    """The pieces of the broken files are whole together; ids out of range name no special token."""
    path = tmp_path / "m.gguf"
    bos = pair("tokenizer.ggml.bos_token_id", U32, number("I", 2**31))
    path.write_bytes(
        Raw(pairs=[GPT2, TOKENS, MERGES, bos, pair("tokenizer.ggml.add_bos_token", BOOL, b"\x01")]).build()
    )
    found = Tokenizer.from_folder(path)
    assert found.encode("abba") == [2, 1, 0]
    assert found.bos_token_id is None


@pytest.mark.parametrize("pattern", sorted({pattern for each in PRE_TOKENIZERS.values() for pattern in each.patterns}))
def test_a_run_of_spaces_is_cut_in_linear_time(pattern: str) -> None:
    """A pattern that tries again from every space would take a minute for each of them."""
    run = " " * 300_000
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for whole in (f"{run}1", f"a{run}", f"a{run}\U0001f600"):
        assert "".join(piece for piece, _ in split.pre_tokenize_str(whole)) == whole


def test_spaces_at_the_end_are_a_piece_of_their_own() -> None:
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["deepseek-llm"].patterns[3]), "isolated")
    for whole, pieces in (("a  b  ", ["a  b", "  "]), ("  ", ["  "]), (" a", [" a"]), ("a ", ["a", " "])):
        assert [piece for piece, _ in split.pre_tokenize_str(whole)] == pieces
