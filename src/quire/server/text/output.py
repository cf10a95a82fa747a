"""Collects the events of an answer while it is parsed."""

from __future__ import annotations

from collections.abc import Callable

from quire.server.text.events import Content, Event, Reasoning, ToolArguments, ToolCallStart
from quire.server.text.reader import Malformed


class Output:
    """What was parsed so far. Space beside reasoning and calls is dropped: it belongs to their tags.

    Args:
        new_id: makes the id of a call that the model gave none.
        most_calls: further calls are read, but not written; None: no limit.
    """

    def __init__(self, new_id: Callable[[], str], most_calls: int | None = None) -> None:
        self._new_id, self._most_calls = new_id, most_calls
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning] | None = Content  # the kind of the pieces; None: arguments
        self._pieces: list[str] = []
        self._space: list[str] = []  # space at the end of the text so far, which is written before the next text
        self.is_edge = False  # only spaces have come since the last tag
        self.num_tags = 0  # tags so far, and the beginnings of calls
        self.num_calls = 0
        self.is_open = False  # the last call is not complete
        self.is_broken = False  # a call was not completed
        self.held: list[str] = []  # the text of a possible call

    def content(self, text: str) -> None:
        self._add_text(Content, text)

    def reasoning(self, text: str) -> None:
        self._add_text(Reasoning, text)

    def _add_text(self, kind: type[Content | Reasoning], text: str) -> None:
        body = text.rstrip()
        if body:
            if self.is_edge:
                self._add(kind, body.lstrip())
            else:
                for space in self._space:
                    self._add(kind, space)
                self._add(kind, body)
            self._space.clear()
            self.is_edge = False
        if not self.is_edge:
            self._space.append(text[len(body) :])

    def edge(self) -> None:
        """Here is a tag between texts."""
        self.num_tags += 1
        self._space.clear()
        self.is_edge = True

    @property
    def is_after_call(self) -> bool:
        """Nothing but space has come since a complete call."""
        return self.is_edge and self.num_calls > 0 and not self.is_open

    def hold(self, text: str) -> None:
        """Text that becomes content, if it does not become a call."""
        self.held.append(text)

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call begins: its arguments follow. Raises Malformed if this cannot be a name."""
        if not name or not name.isprintable():
            raise Malformed
        self.held.clear()
        self.edge()
        self._close()
        self._kind = None
        self.num_calls += 1
        self.is_open = True
        if self._is_shown:
            self._events.append(ToolCallStart(self.num_calls - 1, call_id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if self._is_shown:
            self._add(None, text)

    def end(self) -> None:
        """The call is complete."""
        self.is_open = False

    def give_up(self) -> None:
        """The text is no call, or not the rest of the call."""
        if self.is_open:
            self.is_open, self.is_broken = False, True
        for piece in self.held:
            self.content(piece)
        self.held.clear()

    def take(self) -> list[Event]:
        """The events since the last time."""
        self._close()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The last events."""
        for space in self._space:
            self._add(self._kind, space)
        return self.take()

    @property
    def _is_shown(self) -> bool:
        return self._most_calls is None or self.num_calls <= self._most_calls

    def _add(self, kind: type[Content | Reasoning] | None, text: str) -> None:
        if kind is not self._kind:
            self._close()
            self._kind = kind
        if text:
            self._pieces.append(text)

    def _close(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces.clear()
            if self._kind is None:
                self._events.append(ToolArguments(self.num_calls - 1, text))
            else:
                self._events.append(self._kind(text))
