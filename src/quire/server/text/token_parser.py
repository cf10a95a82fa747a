"""Parses an answer token by token, so that each part of it has the logprobs of its own tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from quire.outputs import CompletionOutput, PositionLogprobs
from quire.server.text.events import Content, Event
from quire.server.text.parser import AnswerParser


class TokenParser:
    """Feeds a parser the text of one token after the other. The result does not depend on the cut of the answer.

    Tokens of tags, of reasoning and of calls have no place in the content. A token that the parser holds back, because
    a tag may begin there, belongs to the content that follows.

    Args:
        left_out: tokens that are no part of the answer's text.
    """

    def __init__(self, parser: AnswerParser, left_out: Collection[int] = ()) -> None:
        self._parser, self._left_out = parser, left_out
        self._text = ""  # text whose tokens have not been taken yet
        self._waiting: deque[PositionLogprobs] = deque()  # tokens whose text has not come: it may be held back
        self._held: list[PositionLogprobs] = []  # tokens since the last event
        self._num_tags = 0
        self._is_content = False  # the last event is content

    def feed(self, completion: CompletionOutput) -> list[tuple[Event, Sequence[PositionLogprobs]]]:
        """The events that the new part of an answer completes. Each Content comes with the logprobs of its tokens."""
        self._text += completion.text
        self._waiting += completion.logprobs or ()
        is_end = completion.finish_reason is not None
        found: list[tuple[Event, Sequence[PositionLogprobs]]] = []
        while self._waiting:
            token_id, logprob = next(iter(self._waiting[0].items()))
            token = "" if token_id in self._left_out else logprob.decoded_token or ""
            if not self._text.startswith(token):
                if token.startswith(self._text) and not is_end:
                    break
                token = self._text  # the token has no text, or a text that depends on its neighbours
            self._text = self._text[len(token) :]
            self._held.append(self._waiting.popleft())
            found += self._with_logprobs(self._parser.feed(token))
        if is_end:
            found += self._with_logprobs(self._parser.feed(self._text) + self._parser.finish())
            if self._held and self._is_content:  # EOS
                found.append((Content(""), self._held))
        return found

    def _with_logprobs(self, events: Sequence[Event]) -> list[tuple[Event, Sequence[PositionLogprobs]]]:
        found: list[tuple[Event, Sequence[PositionLogprobs]]] = []
        if self._num_tags != self._parser.num_tags:
            self._num_tags = self._parser.num_tags
            del self._held[:-1]  # the last token may have text behind the tag
        for event in events:
            self._is_content = isinstance(event, Content)
            found.append((event, self._held if self._is_content else ()))
            self._held = []
        if self._parser.is_at_tag:
            self._held = []
        return found
