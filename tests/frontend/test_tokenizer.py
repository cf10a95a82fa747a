"""Tokenizer: the same ids and text as transformers from the same folder, and errors that name file and remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quire.demo
from quire.errors import ConfigError, ContextLengthError, InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from tests.text.small_tokenizers import build

DEMO = Path(quire.demo.__file__).parent / "target"


def write_folder(folder: Path, kind: str = "llama", **files: object) -> Path:
    """A tokenizer folder; keyword `a__json` is the content of a.json, `a__jinja` that of a.jinja."""
    build(kind).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def test_demo_tokenizer():
    tokenizer = Tokenizer.from_folder(DEMO)
    ids = tokenizer.encode("Hello, wörld 😀!\n")
    assert tokenizer.decode(ids) == "Hello, wörld 😀!\n"
    assert tokenizer.vocab_size == 4096
    assert tokenizer.eos_token_id == 2
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert list(tokenizer.chat_templates) == ["default"]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "Hello, wörld 😀!\n"
    assert tokenizer.decode([*ids, 2, 5000]) == "Hello, wörld 😀!\n"
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace", "byte_level"])
@pytest.mark.parametrize("post_processor", [True, False])
def test_same_as_transformers(tmp_path, kind, post_processor):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
    }
    config["additional_special_tokens"] = ["<new>"]
    folder = write_folder(tmp_path, kind, tokenizer_config__json=config)
    if post_processor:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        backend.save(str(folder / "tokenizer.json"))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in ("the quick 😀 fox", " the</s> a<new>b", "", "a<tool call>b  c"):
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.encode("")[:1] == ([ours.bos_token_id] if post_processor else [])


def test_add_bos_token_is_honoured_without_a_post_processor(tmp_path):
    config = {"bos_token": "<s>", "add_bos_token": True}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, tokenizer_config__json=config))
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("a", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_added_tokens_of_the_other_files(tmp_path):
    added = {
        "400": {"content": "<b>", "special": True, "normalized": False},
        "300": {"content": "<a>", "special": False, "normalized": False},
    }
    folder = write_folder(
        tmp_path,
        tokenizer_config__json={"added_tokens_decoder": added, "pad_token": "<pad>"},
        special_tokens_map__json={"eos_token": "</s>", "pad_token": "<other>"},
        added_tokens__json={"<c>": 500},
    )
    tokenizer = Tokenizer.from_folder(folder)
    names = [
        tokenizer.id_to_token(token_id) for token_id in range(build("llama").get_vocab_size(), tokenizer.vocab_size)
    ]
    assert [name.lstrip("▁") for name in names] == ["<a>", "<b>", "<c>", "<pad>"]
    assert tokenizer.token_to_id("<b>") in tokenizer.special_token_ids
    assert tokenizer.token_to_id("<a>") not in tokenizer.special_token_ids
    assert tokenizer.eos_token_id == tokenizer.token_to_id("</s>")


def test_chat_templates_by_file_and_by_name(tmp_path):
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = write_folder(tmp_path, tokenizer_config__json={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "A", "tool_use": "B"}
    write_folder(tmp_path, tokenizer_config__json={"chat_template": "C"})
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "C"}
    (folder / "chat_template.jinja").write_text("D")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("E")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "D", "rag": "E"}
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates" / "rag.jinja").unlink()
    write_folder(tmp_path, tokenizer_config__json={"chat_template": [{"name": "x"}]})
    with pytest.raises(ConfigError, match=r"chat_template in .*tokenizer_config\.json is malformed"):
        Tokenizer.from_folder(folder)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    folder = write_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("the quick the quick the quick")) > 3


@pytest.mark.parametrize(
    ("files", "mode", "message"),
    [
        ({"tokenizer__json": "{"}, "auto", "tokenizer.json cannot be read as a tokenizer"),
        ({"tokenizer_config__json": "{"}, "auto", "tokenizer_config.json cannot be read as JSON"),
    ],
)
def test_broken_files_are_named(tmp_path, files, mode, message):
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(write_folder(tmp_path, **files), mode)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        Tokenizer.from_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no tokenizer\. Expected tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="--tokenizer-mode slow"):
        Tokenizer.from_folder(tmp_path, "hf")
    with pytest.raises(ConfigError, match="Expected auto, hf or slow"):
        Tokenizer.from_folder(tmp_path, "fast")


def test_conversion_needs_transformers(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the transformers package\. pip install transformers"):
        Tokenizer.from_folder(tmp_path)


def test_conversion_through_transformers(tmp_path):
    """From vocab.json and merges.txt, as GPT-2's first files were."""
    pytest.importorskip("transformers")
    build("byte_level").model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path, "slow")
    ids = tokenizer.encode("the quick 😀")
    assert ids == build("byte_level").encode("the quick 😀").ids
    assert tokenizer.decode(ids) == "the quick 😀"
    (tmp_path / "vocab.json").write_text("[")
    with pytest.raises(ConfigError, match="could not be converted"):
        Tokenizer.from_folder(tmp_path)


def test_text_that_cannot_fit_is_refused_unread():
    tokenizer = Tokenizer.from_folder(DEMO)
    longest = tokenizer.max_chars_per_token
    tokenizer.check_length("x" * 10 * longest, 10)
    with pytest.raises(ContextLengthError, match=f"{10 * longest + 1} characters"):
        tokenizer.check_length("x" * (10 * longest + 1), 10)


def test_lone_surrogates_are_the_users_error():
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        Tokenizer.from_folder(DEMO).encode("a\ud800b")


def test_token_text_shows_incomplete_bytes():
    tokenizer = Tokenizer(build("llama"))
    assert tokenizer.token_text(tokenizer.token_to_id("▁the")) == " the"
    assert tokenizer.token_text(tokenizer.token_to_id("<0xF0>")) == "\ufffd"
    assert tokenizer.token_text(10**6) == ""


def test_the_front_end_loads_neither_torch_nor_transformers():
    code = """
import sys
from pathlib import Path
import quire.demo
import quire.frontend.async_engine, quire.frontend.client, quire.frontend.echo_client, quire.frontend.chat_template
from quire.frontend.tokenizer import Tokenizer
tokenizer = Tokenizer.from_folder(Path(quire.demo.__file__).parent / "target")
assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
