"""Engine deltas become outputs: by kind, with stop strings, logprobs, n continuations, errors and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ContextLengthError, QuireError
from quire.frontend import logprobs
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.stats import NoMetrics
from quire.frontend.stream import merge_outputs
from quire.frontend.tokenizer import Tokenizer
from quire.messages import RequestDelta, pack, unpack
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.schedule import TokenLogprobs
from tests.text.small_tokenizers import build

TOKENIZER = Tokenizer(build("gemma"), special_tokens={"eos_token": "</s>"})
EOS = TOKENIZER.eos_token_id
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Front:
    """Input and output processor as they are used together."""

    def __init__(self, metrics=None) -> None:
        self.clock = Clock()
        limits = ModelLimits(200, TOKENIZER.vocab_size, -1)
        self.inputs = InputProcessor(TOKENIZER, limits)
        self.outputs = OutputProcessor(TOKENIZER, metrics, self.clock)

    def add(self, request_id: str = "r", prompt: object = "a", **params: object):
        params.setdefault("output_kind", DELTA)
        processed = self.inputs.process(
            request_id, prompt, SamplingParams(max_tokens=50, **params), arrival_time=self.clock.now
        )
        self.outputs.add(processed)
        return processed

    def push(self, *deltas: RequestDelta):
        return self.outputs.process(deltas)


def test_delta_outputs_hold_what_is_new():
    front = Front()
    front.add()
    first = front.push(RequestDelta("r-0", ids("the"), num_cached_tokens=3)).outputs[0]
    second = front.push(RequestDelta("r-0", [*ids(" quick"), EOS], finish_reason="stop")).outputs[0]
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("the", ids("the"))
    assert (second.outputs[0].text, second.outputs[0].token_ids) == (" quick", [*ids(" quick"), EOS])
    assert (first.finished, second.finished) == (False, True)
    assert (second.outputs[0].finish_reason, second.outputs[0].stop_reason) == ("stop", None)
    assert (first.prompt, first.prompt_token_ids, first.num_cached_tokens) == ("a", ids("a"), 3)
    assert front.outputs.num_unfinished == 0


def test_cumulative_outputs_hold_everything_and_do_not_change():
    front = Front()
    front.add(output_kind=CUMULATIVE, logprobs=0)
    entry = TokenLogprobs([1], [-0.5], [1])
    outputs = [
        front.push(RequestDelta("r-0", ids(char), logprobs=[entry], finish_reason=reason)).outputs[0].outputs[0]
        for char, reason in (("a", None), ("b", None), ("c", "length"))
    ]
    assert [output.text for output in outputs] == ["a", "ab", "abc"]
    assert [len(output.token_ids) for output in outputs] == [1, 2, 3]
    assert [len(output.logprobs) for output in outputs] == [1, 2, 3]
    assert [output.cumulative_logprob for output in outputs] == [-0.5, -1.0, -1.5]


def test_final_only_outputs_come_once():
    front = Front()
    front.add(output_kind=FINAL_ONLY)
    assert front.push(RequestDelta("r-0", ids("a"))).outputs == []
    assert front.push(RequestDelta("r-0", ids("b"))).outputs == []
    (output,) = front.push(RequestDelta("r-0", [*ids("c"), EOS], finish_reason="stop")).outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abc", [*ids("abc"), EOS])


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_stop_strings_end_the_request_and_abort_it_in_the_engine(kind):
    front = Front()
    front.add(output_kind=kind, stop=["quick"])
    text, token_ids = "", []
    num_pushed = 0
    for token_id in ids("the quick fox"):
        num_pushed += 1
        result = front.push(RequestDelta("r-0", [token_id]))
        for output in result.outputs:
            assert "quick" not in output.outputs[0].text
            text = text * (kind is DELTA) + output.outputs[0].text
            token_ids = token_ids * (kind is DELTA) + output.outputs[0].token_ids
        if result.abort_ids:
            break
    assert text == "the "
    assert token_ids == ids("the quick fox")[:num_pushed]
    assert result.abort_ids == ["r-0"]
    last = result.outputs[0].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "quick")
    assert front.push(RequestDelta("r-0", ids("late"))).outputs == []


def test_a_stop_string_in_the_engines_last_delta_needs_no_abort():
    front = Front()
    front.add(stop=["b"], include_stop_str_in_output=True)
    result = front.push(RequestDelta("r-0", ids("abcd"), finish_reason="length"))
    output = result.outputs[0].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, result.abort_ids) == ("ab", ids("ab"), "stop", [])


def test_text_of_the_stop_token():
    for include, text in ((False, "a"), (True, "ab")):
        front = Front()
        front.add(stop_token_ids=ids("b"), include_stop_str_in_output=include)
        delta = RequestDelta("r-0", ids("ab"), finish_reason="stop", stop_reason=ids("b")[0])
        output = front.push(delta).outputs[0].outputs[0]
        assert (output.text, output.token_ids, output.stop_reason) == (text, ids("ab"), ids("b")[0])


def test_incomplete_characters_are_held_back_and_flushed():
    front = Front()
    front.add()
    smile = ids("😀")
    texts = [front.push(RequestDelta("r-0", [token_id])).outputs[0].outputs[0].text for token_id in smile]
    assert texts == ["", "", "", "😀"]
    last = front.push(RequestDelta("r-0", smile[:2], finish_reason="length")).outputs[0].outputs[0]
    assert last.text == "\ufffd"


def test_stream_interval():
    front = Front()
    front.add(stream_interval=3)
    counts = []
    for index in range(8):
        delta = RequestDelta("r-0", ids("a"), finish_reason="length" if index == 7 else None)
        counts += [len(output.outputs[0].token_ids) for output in front.push(delta).outputs]
    assert counts == [1, 3, 3, 1]


def test_without_detokenization():
    front = Front()
    front.add(detokenize=False)
    output = front.push(RequestDelta("r-0", ids("ab"), finish_reason="length")).outputs[0].outputs[0]
    assert (output.text, output.token_ids) == ("", ids("ab"))


def test_logprobs():
    front = Front()
    front.add(logprobs=1, prompt="abc", prompt_logprobs=1)
    smile = ids("😀")
    a, b = ids("ab")
    prompt = [pack(TokenLogprobs([b, a], [-2.0, -1.0], [2, 1])), pack(TokenLogprobs(ids("c"), [-0.1], [1]))]
    entries = [TokenLogprobs([a, b], [-0.5, -1.0], [1, 2]), TokenLogprobs([b, a, b], [-1.5, -0.5, -1.5], [2, 1, 2])]
    output = front.push(RequestDelta("r-0", [a, b], logprobs=entries, prompt_logprobs=prompt)).outputs[0]
    completion = output.outputs[0]
    assert [list(position) for position in completion.logprobs] == [[a, b], [b, a]], "the sampled token comes first"
    assert [position[a].decoded_token for position in completion.logprobs] == ["a", "a"]
    assert (completion.logprobs[1][b].logprob, completion.logprobs[1][b].rank) == (-1.5, 2)
    assert completion.cumulative_logprob == -2.0
    assert len(output.prompt_logprobs) == 3
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1][b].decoded_token == "b"
    assert [list(position) for position in output.prompt_logprobs[1:]] == [[b, a], ids("c")]
    entries = [TokenLogprobs([token_id, a], [-1.0, -2.0], [1, 2]) for token_id in smile]
    output = front.push(RequestDelta("r-0", smile, logprobs=entries)).outputs[0]
    shown = [
        position[token_id].decoded_token for position, token_id in zip(output.outputs[0].logprobs, smile, strict=True)
    ]
    assert shown == ["", "", "", "😀"], "the token that completes a character shows it"
    assert output.prompt_logprobs is None, "prompt logprobs come once"
    assert output.outputs[0].cumulative_logprob == -6.0


def test_logprobs_end_with_the_stop_string():
    front = Front()
    front.add(logprobs=0, stop=["b"])
    entries = [TokenLogprobs([token_id], [-1.0], [1]) for token_id in ids("abc")]
    output = front.push(RequestDelta("r-0", ids("abc"), logprobs=entries)).outputs[0].outputs[0]
    assert (len(output.logprobs), output.cumulative_logprob) == (2, -2.0)


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_continuations_are_one_request(kind):
    front = Front()
    front.add(n=3, output_kind=kind)
    assert front.outputs.num_unfinished == 1
    result = front.push(RequestDelta("r-0", ids("a")), RequestDelta("r-0.2", ids("c"), finish_reason="length"))
    if kind is DELTA:
        assert [(output.request_id, output.outputs[0].index, output.finished) for output in result.outputs] == [
            ("r", 0, False),
            ("r", 2, False),
        ]
    else:
        assert result.outputs == []
    front.push(RequestDelta("r-0.1", ids("b"), finish_reason="length"))
    (last,) = front.push(RequestDelta("r-0", ids("z"), finish_reason="length")).outputs
    assert last.finished
    if kind is FINAL_ONLY:
        assert [(output.index, output.text) for output in last.outputs] == [(0, "az"), (1, "b"), (2, "c")]
    assert front.outputs.num_unfinished == 0


def test_an_error_ends_the_request_with_all_its_continuations():
    front = Front()
    front.add(n=3)
    front.add("other")
    front.push(RequestDelta("r-0.2", ids("c"), finish_reason="length"))
    error = RequestDelta("r-0.1", finish_reason="error", error="Too long.", error_code=ContextLengthError.code)
    result = front.push(error, RequestDelta("other-1", ids("a")))
    assert result.abort_ids == ["r-0"]
    assert isinstance(result.errors["r"], ContextLengthError)
    failed, other = result.outputs
    assert (failed.request_id, failed.finished, failed.error) == ("r", True, "Too long.")
    assert [output.finish_reason for output in failed.outputs] == ["error", "error", "length"]
    assert (other.request_id, other.finished) == ("other", False)
    assert front.outputs.num_unfinished == 1
    assert "other" in front.outputs


def test_unknown_error_codes_are_internal():
    front = Front()
    front.add()
    result = front.push(RequestDelta("r-0", finish_reason="error", error="x", error_code="never heard"))
    assert type(result.errors["r"]) is QuireError


def test_our_own_failure_ends_one_request_only(monkeypatch):
    front = Front()
    front.add("bad")
    front.add("good")
    child = front.outputs._continuations["bad-0"]
    monkeypatch.setattr(child, "pipeline", None)
    monkeypatch.setattr(child, "logprob_decoder", object())
    entries = [TokenLogprobs([1], [-1.0], [1])]
    result = front.push(RequestDelta("bad-0", ids("a"), logprobs=entries), RequestDelta("good-1", ids("a")))
    assert result.abort_ids == ["bad-0"]
    assert "could not be processed (AttributeError)" in result.errors["bad"].message
    assert [output.request_id for output in result.outputs] == ["bad", "good"]


def test_our_own_failure_on_the_last_delta_leaves_nothing_behind(monkeypatch):
    front = Front()
    front.add()
    monkeypatch.setattr(front.outputs._continuations["r-0"], "pipeline", object())
    result = front.push(RequestDelta("r-0", [*ids("a"), EOS], finish_reason="stop"))
    (output,) = result.outputs
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
    assert front.outputs.num_unfinished == 0
    front.add()


def test_abort_forgets():
    front = Front()
    front.add(n=2)
    front.push(RequestDelta("r-0.1", ids("c"), finish_reason="length"))
    assert front.outputs.abort(["r", "unknown"]) == ["r-0"]
    assert front.outputs.num_unfinished == 0
    assert front.push(RequestDelta("r-0", ids("c"))).outputs == []


class Recorder(NoMetrics):
    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.finished = []

    def on_request_arrived(self, request):
        self.calls.append(("arrived", request.request_id))

    def on_first_token(self, seconds, num_tokens, num_prompt_tokens, num_cached_tokens):
        self.calls.append(("first", seconds, num_tokens, num_prompt_tokens, num_cached_tokens))

    def on_tokens(self, num_tokens, seconds):
        self.calls.append(("tokens", num_tokens, seconds))

    def on_finished(self, finished):
        self.finished.append(finished)


def test_times_and_counts():
    metrics = Recorder()
    front = Front(metrics)
    front.add()
    for seconds, count, reason in ((2.0, 1, None), (0.5, 2, None), (1.0, 1, "length")):
        front.clock.now += seconds
        delta = RequestDelta("r-0", ids("a") * count, finish_reason=reason, num_preemptions=count, num_cached_tokens=1)
        if reason is None and count == 1:
            delta.queued_seconds = 0.75
        (output,) = front.push(delta).outputs
    assert metrics.calls == [("arrived", "r"), ("first", 2.0, 1, 1, 1), ("tokens", 2, 0.5), ("tokens", 1, 1.0)]
    (finished,) = metrics.finished
    assert (finished.e2e_seconds, finished.queued_seconds, finished.prefill_seconds) == (3.5, 0.75, 1.25)
    assert (finished.decode_seconds, finished.inference_seconds, finished.seconds_per_output_token) == (1.5, 2.75, 0.5)
    assert (finished.num_prompt_tokens, finished.num_output_tokens, finished.num_cached_tokens) == (1, 4, 1)
    assert (finished.finish_reason, finished.max_tokens, finished.n) == ("length", 50, 1)
    times = output.metrics
    assert (times.arrival_time, times.first_scheduled_time, times.first_token_time) == (100.0, 100.75, 102.0)
    assert (times.last_token_time, times.finished_time, times.num_preemptions) == (103.5, 103.5, 1)


def test_aborted_requests_are_counted():
    metrics = Recorder()
    front = Front(metrics)
    front.add()
    front.outputs.abort(["r"])
    (finished,) = metrics.finished
    assert (finished.finish_reason, finished.num_output_tokens, finished.queued_seconds) == ("abort", 0, None)


@given(data=st.data(), kind=st.sampled_from([CUMULATIVE, DELTA]), num=st.integers(1, 3))
def test_merged_outputs_lose_nothing(data, kind, num):
    """A reader that is slow at any places sees the same request in fewer pieces."""
    front = Front()
    front.add(n=num, output_kind=kind, logprobs=0)
    names = ["r-0", "r-0.1", "r-0.2"][:num]
    outputs = []
    for index in range(data.draw(st.integers(1, 8))):
        for name in names:
            token_id = ids("abcdefgh")[index]
            delta = RequestDelta(name, [token_id], logprobs=[TokenLogprobs([token_id], [-1.0], [1])])
            outputs += front.push(delta).outputs
    count = len(outputs) // num
    reference = {index: ("abcdefgh"[:count], ids("abcdefgh")[:count], count) for index in range(num)}
    seen: dict[int, tuple[str, list[int], int]] = {index: ("", [], 0) for index in range(num)}
    unread = None
    for position, output in enumerate(outputs):
        unread = output if unread is None else merge_outputs(unread, output, kind is DELTA)
        if position == len(outputs) - 1 or data.draw(st.booleans()):
            for completion in unread.outputs:
                text, token_ids, num_logprobs = seen[completion.index] if kind is DELTA else ("", [], 0)
                seen[completion.index] = (
                    text + completion.text,
                    token_ids + completion.token_ids,
                    num_logprobs + len(completion.logprobs),
                )
            unread = None
    assert seen == reference


def test_prompt_logprobs_are_made_by_whoever_reads_them(monkeypatch):
    """Not by the event loop, which hands them on."""
    made = []
    monkeypatch.setattr(logprobs, "unpack", lambda packed: made.append(packed) or unpack(packed))
    front = Front()
    front.add(prompt="abc", prompt_logprobs=1)
    prompt = [pack(TokenLogprobs(ids(text), [-0.1], [1])) for text in "bc"]
    output = front.push(RequestDelta("r-0", ids("x"), prompt_logprobs=prompt)).outputs[0]
    assert (len(output.prompt_logprobs), made) == (3, [])
    assert [None if p is None else [e.decoded_token for e in p.values()] for p in output.prompt_logprobs] == [
        None, ["b"], ["c"],
    ]  # fmt: skip
    assert made == prompt
