"""Reads a model folder's tokenizer files: backend, special tokens, chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from quire import logs
from quire.errors import ConfigError

# Names in tokenizer_config.json; templates see them under these names too.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Files that transformers can convert, in a folder without tokenizer.json.
SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model.v3",
    "vocab.json",
    "tekken.json",
    "tiktoken.model",
)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} without a file. Raises ConfigError for other content."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", fix="Download the file again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object", fix="Download the file again")
    return content


def load_backend(folder: Path, mode: str) -> tokenizers.Tokenizer:
    """The tokenizers library's object, from tokenizer.json, or converted through transformers ("slow", or no file)."""
    path = folder / "tokenizer.json"
    if mode != "slow" and path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"{path} cannot be read as a tokenizer: {error}",
                fix="Download the file again, upgrade the tokenizers package, or use --tokenizer-mode slow",
            ) from error
    else:
        backend = _convert(folder, mode)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _convert(folder: Path, mode: str) -> tokenizers.Tokenizer:
    """Convert the tokenizer through transformers. Only this function of the front end imports it."""
    if mode == "hf":
        raise ConfigError(
            f"{folder} has no tokenizer.json",
            fix="Use --tokenizer-mode slow, or a folder with tokenizer.json",
            param="tokenizer_mode",
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", *SLOW_FILES)):
        raise ConfigError(
            f"{folder} has no tokenizer",
            expected="tokenizer.json, or one of " + ", ".join(SLOW_FILES),
            fix="Name a folder that has one with --tokenizer",
            param="tokenizer",
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and converting its tokenizer needs the transformers package",
            fix="pip install transformers sentencepiece tiktoken, or use a folder with tokenizer.json",
            param="tokenizer",
        ) from error
    logs.adopt("transformers")
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend = converted.backend_tokenizer
    except Exception as error:  # errors of many packages and files: all mean that the tokenizer is not usable
        raise ConfigError(
            f"The tokenizer in {folder} could not be converted: {error}",
            fix="Use a folder with tokenizer.json, or install what the message asks for",
            param="tokenizer",
        ) from error
    return tokenizers.Tokenizer.from_str(backend.to_str())


def add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Add tokens of the other files that tokenizer.json lacks, in the order of their ids, as in transformers."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, tokenizers.AddedToken] = {}
    declared = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        flags = {
            name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in entry
        }
        missing[entry["content"]] = tokenizers.AddedToken(entry["content"], **flags)
    for content, _ in sorted(read_json(folder / "added_tokens.json").items(), key=lambda item: item[1]):
        missing.setdefault(content, tokenizers.AddedToken(content))
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    for special in [*special_tokens(config).values(), *map(_content, extra)]:
        if special:
            missing.setdefault(special, tokenizers.AddedToken(special, special=True, normalized=False))
    new = [token for content, token in missing.items() if content not in known]
    backend.add_tokens([token for token in new if backend.token_to_id(token.content) is None or token.special])


def _content(token: Any) -> str | None:
    """The text of a special token, which is a string or {"content": ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> token of the special tokens that are set."""
    found = {name: _content(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    return {name: content for name, content in found.items() if content}


def load_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over the older special_tokens_map.json."""
    return read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")


def load_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Jinja source. Files override tokenizer_config.json. The unnamed template is called "default"."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if templates:
        return templates
    declared = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(declared, str):
        return {"default": declared}
    try:
        return (
            {entry["name"]: entry["template"] for entry in declared} if isinstance(declared, list) else dict(declared)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"chat_template in {folder / 'tokenizer_config.json'} is malformed",
            expected='a string, or a list of {"name": ..., "template": ...}',
            fix="Correct it, or give a template with --chat-template",
        ) from error


def chat_template_text(templates: Mapping[str, str], override: str | None) -> str:
    """The source of the templates that chats may be rendered with.

    Args:
        templates: the model's.
        override: Jinja source, or the name of one of the model's templates, in place of all; None: the model's.
    """
    return "\n".join(templates.values()) if override is None else templates.get(override, override)


def load_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json; {} if there is none."""
    return read_json(folder / "generation_config.json")
