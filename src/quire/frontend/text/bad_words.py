"""All spellings of a word in tokens, for `bad_words`.

A word is text between boundaries. There is no boundary between two letters, digits or underscores. Scripts without
spaces have a boundary between any two characters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

from quire.sampling_params import SpelledWord, SpelledWords

# Thai to Lao, Myanmar, Khmer, ideographs and kana of all planes
_WITHOUT_SPACES = (
    r"\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u2E80-\u9FFF\uA000-\uA4CF\uF900-\uFAFF\uFF66-\uFF9F"
    r"\U0001B000-\U0001B16F\U00020000-\U0003FFFF"
)
_RUN = re.compile(rf"(?:(?![{_WITHOUT_SPACES}])\w)+|\s+|.", re.DOTALL)  # there is a boundary between any two
_WORD = re.compile(rf"(?![{_WITHOUT_SPACES}])\w")
_KEY = 4  # bytes: tokens with the same first four have few lengths, and most parts of a word begin no token that long


class WordIndex:
    """The tokens of a vocabulary by their text. Building it takes a second or two for 150,000 tokens.

    Args:
        tokens: id and bytes of every token.
    """

    def __init__(self, tokens: Iterable[tuple[int, bytes]]) -> None:
        self._whole: defaultdict[bytes, list[int]] = defaultdict(list)
        self._heads: defaultdict[bytes, list[int]] = defaultdict(list)  # text up to a boundary inside the token
        self._tails: defaultdict[bytes, list[int]] = defaultdict(list)  # text from a boundary inside the token on
        self._inside: defaultdict[bytes, list[int]] = defaultdict(list)  # text between two boundaries inside the token
        self._lengths: defaultdict[bytes, set[int]] = defaultdict(set)  # lengths of tokens, by their first _KEY bytes
        inside_word = bytearray()
        for token_id, data in tokens:
            if not data:
                continue
            text = data.decode("utf-8", "surrogateescape")  # a part of a character is no letter, so it is a boundary
            boundaries = _boundaries(text)
            self._whole[data].append(token_id)
            for at in boundaries:
                self._heads[data[:at]].append(token_id)
                self._tails[data[at:]].append(token_id)
            for inner in {data[begin:end] for begin, end in combinations(boundaries, 2)}:
                self._inside[inner].append(token_id)
            if len(data) >= _KEY:
                self._lengths[data[:_KEY]].add(len(data))
            if _WORD.match(text[-1]):
                inside_word.extend(bytes(max(0, token_id // 8 + 1 - len(inside_word))))
                inside_word[token_id // 8] |= 1 << token_id % 8
        self._inside_word = bytes(inside_word)

    def spell(self, words: Iterable[str]) -> SpelledWords:
        """The spellings of these words. Spaces around a word do not count."""
        return SpelledWords([self._spell(word.strip()) for word in words], self._inside_word)

    def _spell(self, word: str) -> SpelledWord:
        data = word.encode()
        end = len(data)
        anywhere: defaultdict[int, list[int]] = defaultdict(list)
        for count in range(1, end + 1):
            for token_id in self._tails.get(data[:count], ()):
                anywhere[token_id].append(count)
        for token_id in self._inside.get(data, ()):
            anywhere[token_id].append(end)
        steps = [self._tokens_from(data, begin) for begin in range(end)]
        if not _WORD.match(word):  # the text before does not matter
            for token_id, counts in steps[0].items():
                anywhere[token_id] += counts
            steps[0] = {}
        return SpelledWord(dict(anywhere), steps)

    def _tokens_from(self, data: bytes, begin: int) -> dict[int, list[int]]:
        """The tokens that continue a word after its first `begin` bytes, each with the number of bytes after it."""
        end = len(data)
        found = {token_id: [end] for token_id in self._heads.get(data[begin:], ())}
        for length in (*range(1, _KEY), *self._lengths.get(data[begin : begin + _KEY], ())):
            if begin + length <= end:
                for token_id in self._whole.get(data[begin : begin + length], ()):
                    found[token_id] = [begin + length]
        return found


def _boundaries(text: str) -> list[int]:
    """Boundaries inside a text, in bytes."""
    ends, at = [], 0
    for run in _RUN.findall(text):
        at += len(run) if run.isascii() else len(run.encode("utf-8", "surrogateescape"))
        ends.append(at)
    return ends[:-1]
