"""Suffix decoding in plain Python: lists that are searched from one end to the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quire.request import Request

PAGE_TOKENS, PAGE_BYTES = 32, 1184
NGRAMS = (1, 2, 4, 8)
MOST_PLACES = 32


@dataclass
class Answer:
    """The kept part of one request's answer: the oldest tokens may be gone."""

    tenant: tuple[str | None, str | None]
    tokens: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)  # of each token, rising over all answers


@dataclass
class SuffixTwin:
    depth: int
    max_requests: int
    factor: float
    min_probability: float
    num_pages: int = 1 << 16
    answers: list[Answer] = field(default_factory=list)
    pages: list[tuple[Answer, int]] = field(default_factory=list)  # oldest first, with their tokens
    open: dict[str, tuple[Answer, int]] = field(default_factory=dict)  # and how much of the output is shared
    num_shared: int = 0

    def propose(self, request: Request, most: int) -> list[int]:
        self._share(request, PAGE_TOKENS)
        text = request.token_ids()
        best, best_score = self._draft(text, [(text, list(range(len(text))))], len(text) - 1, most)
        tenant = (request.cache_salt, request.adapter)
        texts = [(answer.tokens, answer.ages) for answer in self.answers if answer.tenant == tenant]
        draft, score = self._draft(text, texts, None, most)
        return draft if score > best_score else best

    def forget(self, request: Request) -> None:
        if request.request_id in self.open:
            self._share(request, PAGE_TOKENS)
            self._share(request, 1)
            del self.open[request.request_id]

    def _share(self, request: Request, least: int) -> None:
        tenant = (request.cache_salt, request.adapter)
        answer, start = self.open.get(request.request_id, (Answer(tenant), 0))
        while self.max_requests and len(request.output_token_ids) - start >= least:
            page = request.output_token_ids[start : start + PAGE_TOKENS]
            while len(self.pages) >= self.num_pages:
                self._drop()
            if not answer.tokens:
                answer = Answer(tenant)
                self.answers.append(answer)
                while len(self.answers) > self.max_requests:
                    self._drop()
            answer.tokens += page
            answer.ages += range(self.num_shared, self.num_shared + len(page))
            self.num_shared += len(page)
            self.pages.append((answer, len(page)))
            start += len(page)
        self.open[request.request_id] = answer, start

    def _drop(self) -> None:
        answer, count = self.pages.pop(0)
        del answer.tokens[:count], answer.ages[:count]
        if not answer.tokens:
            self.answers = [other for other in self.answers if other is not answer]

    def _draft(
        self, text: list[int], texts: list[tuple[list[int], list[int]]], end: int | None, most: int
    ) -> tuple[list[int], float]:
        """`end` is no place: there the text ends."""
        best: list[int] = []
        best_score = 0.0
        for length in range(min(len(text), self.depth - 1), 0, -1):
            ngram = max(count for count in NGRAMS if count <= length)
            places = []
            for tokens, ages in texts:
                places += [
                    (ages[last], last, tokens)
                    for last in range(ngram - 1, len(tokens))
                    if last != end and tokens[last - ngram + 1 : last + 1] == text[-ngram:]
                ]
            newest = sorted(places, key=lambda place: -place[0])[:MOST_PLACES]
            matching = [
                tokens[last + 1 :]
                for _, last, tokens in newest
                if last + 1 >= length and tokens[last + 1 - length : last + 1] == text[-length:]
            ]
            most_here = min(most, int(length * self.factor + 1e-6), self.depth - length)
            draft, score = self._follow(matching, most_here)
            if score > best_score:
                best, best_score = draft, score
        return best, best_score

    def _follow(self, rests: list[list[int]], most: int) -> tuple[list[int], float]:
        draft: list[int] = []
        score, probability = 0.0, 1.0
        while len(draft) < most:
            counts = Counter(rest[len(draft)] for rest in rests if len(rest) > len(draft))
            if not counts:
                break
            token, count = counts.most_common(1)[0]  # of equal ones, the first that was counted
            probability *= count / len(rests)
            if probability < self.min_probability:
                break
            rests = [rest for rest in rests if len(rest) > len(draft) and rest[len(draft)] == token]
            draft.append(token)
            score += probability
        return draft, score
