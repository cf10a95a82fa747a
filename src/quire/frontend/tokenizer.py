"""Text to token ids and back with the `tokenizers` library, and other facts about a model's vocabulary."""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import ConfigError, ContextLengthError, InvalidRequestError
from quire.frontend import tokenizer_files
from quire.frontend.gguf_tokenizer import read_gguf_tokenizer
from quire.frontend.text.bad_words import WordIndex
from quire.frontend.text.detokenizer import ByteDetokenizer, TokenBytes, WindowDetokenizer, compile_decoder
from quire.frontend.text.pipeline import Detokenizer
from quire.gguf.file import is_gguf

_INDEXING = threading.Lock()  # building an index takes a second, so several threads wait for one index


class Tokenizer:
    """Encodes, decodes and describes one vocabulary.

    Args:
        backend: the tokenizers library's object, without truncation or padding.
        special_tokens: name (`bos_token`, `eos_token`, ...) -> token, as in tokenizer_config.json.
        add_bos: prepend the BOS token even if the backend's post-processor does not.
        chat_templates: name -> Jinja source; the usual one is called "default".
        config: the content of tokenizer_config.json, or a similar part of another file.
        name: usually its folder, for error messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool = False,
        chat_templates: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        name: str = "the tokenizer",
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.config = dict(config or self.special_tokens)
        self.name = name
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.added_token_ids = frozenset(backend.get_added_tokens_decoder())
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        adds_tokens = backend.num_special_tokens_to_add(False) > 0
        self._bos_prefix = [self.bos_token_id] if add_bos and not adds_tokens and self.bos_token_id is not None else []
        self._rule = compile_decoder(_decoder_json(backend))
        self._tables: dict[tuple[bool, bool], TokenBytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path, mode: str = "auto") -> Tokenizer:
        """Read a model folder, or a GGUF file.

        Args:
            mode: "hf": tokenizer.json; "slow": converted through transformers; "auto": the first possible one. A GGUF
                file has only one.
        Raises:
            ConfigError: a file is missing or malformed, or transformers is needed and missing.
        """
        folder = Path(folder)
        if is_gguf(folder):
            found = read_gguf_tokenizer(folder)
            return cls(
                found.backend,
                special_tokens=found.special_tokens,
                add_bos=found.add_bos,
                chat_templates=found.chat_templates,
                name=str(folder),
            )
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {folder}", fix="Check --tokenizer, or --model", param="tokenizer")
        if mode not in ("auto", "hf", "slow"):
            raise ConfigError("Unknown tokenizer mode", value=mode, expected="auto, hf or slow", param="tokenizer_mode")
        config = tokenizer_files.load_config(folder)
        backend = tokenizer_files.load_backend(folder, mode)
        tokenizer_files.add_missing_tokens(backend, config, folder)
        return cls(
            backend,
            special_tokens=tokenizer_files.special_tokens(config),
            add_bos=config.get("add_bos_token") is True,
            chat_templates=tokenizer_files.load_chat_templates(folder, config),
            config=config,
            name=str(folder),
        )

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Special token -> its id. Such tokens are left out of texts by default."""
        tokens = self.backend.get_added_tokens_decoder()
        return {tokens[token_id].content: token_id for token_id in self.special_token_ids}

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def max_chars_per_token(self) -> int:
        """Length of the longest token. A text of n characters has at least n / max_chars_per_token tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def words(self) -> WordIndex | None:
        """An index of spellings; None if a token's text depends on its neighbours. The first call is slow."""
        with _INDEXING:
            return self._words

    @cached_property
    def _words(self) -> WordIndex | None:
        if self._rule is None:
            return None
        ids = set(self.backend.get_vocab(with_added_tokens=True).values())
        texts = ids - self.special_token_ids - {self.eos_token_id}  # the bad word "end" must not forbid <|end|>
        return WordIndex((token_id, self.token_bytes(token_id)) for token_id in sorted(texts))

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that cannot fit, before it takes time.

        Raises:
            ContextLengthError: every tokenization of the text has more than `max_tokens` tokens.
        """
        if len(text) > max_tokens and len(text) > max_tokens * self.max_chars_per_token:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters, which is more than {max_tokens} tokens can hold",
                expected=f"at most {max_tokens} tokens",
                fix="Shorten the prompt",
                param="prompt",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. The interpreter lock is free while the library works.

        Args:
            add_special_tokens: let the post-processor (or add_bos_token) add BOS and EOS.
        Raises:
            InvalidRequestError: the text is not valid Unicode (a lone surrogate).
        """
        try:
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(
                "The text is not valid Unicode", fix="Remove lone surrogates such as \\ud800", param="prompt"
            ) from error
        return self._bos_prefix + ids if add_special_tokens and self._bos_prefix else ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of a whole token sequence, equal to its joined stream. Unknown ids have no text."""
        detokenizer = self.new_detokenizer((), skip_special_tokens, spaces_between_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def new_detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """A detokenizer for the output after a prompt. If the prompt has text, a leading space of the output stays.

        `spaces_between_special_tokens` matters only for decoders that put spaces between tokens.
        """
        if self._rule is None:

            def decode(token_ids: Sequence[int]) -> str:
                return self._decode_unusual(token_ids, skip_special_tokens, spaces_between_special_tokens)

            return WindowDetokenizer(decode, prompt_token_ids)
        table = self._table(skip_special_tokens)
        # A prompt of special tokens alone would be read to its beginning, for each of n continuations.
        is_same_at_start = self._rule.first is None and not self._rule.strip_left
        if is_same_at_start or any(table[token_id] for token_id in reversed(prompt_token_ids)):
            return ByteDetokenizer(table, pending=_incomplete_end(table, prompt_token_ids))
        first = self._table(skip_special_tokens, as_first=True) if self._rule.first else None
        return ByteDetokenizer(table, first, self._rule.strip_left)

    def _table(self, skip_special_tokens: bool, as_first: bool = False) -> TokenBytes:
        key = (skip_special_tokens, as_first)
        if key not in self._tables:
            rule = self._rule
            assert rule is not None
            encode = rule.first if as_first and rule.first else rule.encode
            self._tables[key] = TokenBytes(
                self.backend.id_to_token, encode, self.special_token_ids if skip_special_tokens else frozenset()
            )
        return self._tables[key]

    def _decode_unusual(self, token_ids: Sequence[int], skip_special: bool, spaces: bool) -> str:
        """Text from the library's decoder. Without `spaces`, added tokens are joined to their neighbours directly."""
        if skip_special or spaces:
            text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special)
            return text
        pieces: list[str] = []
        run: list[int] = []
        for token_id in token_ids:
            if token_id in self.added_token_ids:
                pieces += [self.backend.decode(run, skip_special_tokens=False), self.id_to_token(token_id) or ""]
                run = []
            else:
                run.append(token_id)
        return "".join([*pieces, self.backend.decode(run, skip_special_tokens=False)])

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """A conversation as prompt text, or as its token ids if `tokenize`. The defaults are transformers'.

        Args:
            chat_template: Jinja source, or the name of one of the model's templates, instead of the default.
            kwargs: further variables of the template.
        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them. ConfigError: no template.
        """
        from quire.frontend.chat_template import ChatRenderer  # jinja2 is slow to import and not always needed

        text = ChatRenderer(self.chat_templates, self.special_tokens, override=chat_template, name=self.name).render(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, also of a special one, inside a text; b"" for an unknown id."""
        if self._rule is not None:
            return self._table(False)[token_id]
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The text of a single token; U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (`Ġhello`, `▁hello`, `<0x0A>`); None for an unknown id."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by the vocabulary's spelling; None for an unknown token."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id


def _decoder_json(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return decoder


def _incomplete_end(table: TokenBytes, token_ids: Sequence[int]) -> bytes:
    """Bytes of a character that the prompt begins and the output may complete."""
    data = b"".join([table[token_id] for token_id in token_ids[-4:]])
    return data[codecs.utf_8_decode(data, "replace", False)[1] :]


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ConfigError for the first id that has different tokens in the two vocabularies.

    If one vocabulary is larger, its further tokens are padding.
    """
    names = [{token_id: token for token, token_id in each.backend.get_vocab(True).items()} for each in (target, draft)]
    differing = (token_id for token_id in names[0].keys() & names[1].keys() if names[0][token_id] != names[1][token_id])
    if (first := min(differing, default=None)) is not None:
        raise ConfigError(
            f"The draft model has another vocabulary than the model: token {first} is {names[0][first]!r} to the model",
            value=names[1][first],
            expected="a model with the same tokenizer",
            fix="Name another model in --speculative-config, or use the methods ngram or suffix, which need none",
            param="speculative_config",
        )
