"""Predicted times to the first token beside the simulated ones."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Final

from llmstack_engine_client.prediction import EnginePredictor, QueuedTokens, StepLimits
from llmstack_engine_client.routing.index import RoutingIndex
from llmstack_engine_core.messages.protocol import CacheUpdate
from llmstack_kv_cache.segments import segment_blocks, segment_keys
from llmstack_types import EngineCoreOutput, RequestProgress, SchedulerStats

MAX_SHARE: Final = 0.25
MAX_ERROR_S: Final = 0.02
# Further waiting requests count with the mean of these.
_MAX_COUNTED: Final = 1024
# More than any answer of a trace: a client that names no limit gets what the model can do.
_MAX_OUTPUT_TOKENS: Final = 1 << 17
# Eight times what a server keeps of its replicas: the pool of a simulation may be unbounded.
_MAX_SEGMENTS: Final = 1 << 22


@dataclass(slots=True)
class PredictionErrors:
    """Predictions that can be compared with what came.

    Attributes:
        num_unpredicted: Requests that came before enough steps were measured.
        predicted_s: By request, the predicted time to the first token.
        real_s: The simulated one.
    """

    num_unpredicted: int = 0
    predicted_s: array[float] = field(default_factory=lambda: array("d"))
    real_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def share_met(self) -> float:
        """The share within 25 % or 20 ms of what was predicted."""
        pairs = list(zip(self.predicted_s, self.real_s, strict=True))
        num_met = sum(abs(real - predicted) <= max(MAX_SHARE * predicted, MAX_ERROR_S) for predicted, real in pairs)
        return num_met / len(pairs) if pairs else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        errors = sorted(real - predicted for predicted, real in zip(self.predicted_s, self.real_s, strict=True))
        return {
            "predicted": len(errors),
            "unpredicted": self.num_unpredicted,
            "share_met": self.share_met,
            "error_s": {f"p{p}": errors[len(errors) * p // 100] for p in (5, 50, 95) if errors},
        }

    def to_text(self) -> str:
        """A line for a reader."""
        named = self.to_json()
        spread = ", ".join(f"{name} {1000 * value:+.1f} ms" for name, value in named["error_s"].items())
        text = f"{100 * self.share_met:.1f} % of {named['predicted']} first tokens within 25 % or 20 ms"
        return f"{text}, error {spread or '-'}, {self.num_unpredicted} without a prediction"


@dataclass(slots=True)
class _Queued:
    num_prompt_tokens: int
    num_tokens: int
    arrival_s: float
    prompt_number: int
    keys: list[int]
    num_output_tokens: int = 0
    predicted_s: float | None = None


class TracePredictor:
    """Predicts each request of one replica from what a server would know: what was reported before it came."""

    def __init__(self, limits: StepLimits, block_size: int, errors: PredictionErrors) -> None:
        self._predictor = EnginePredictor(limits, block_size)
        self._errors = errors
        self._index = RoutingIndex(1, _MAX_SEGMENTS)
        self._block_size = block_size
        self._queued: dict[str, _Queued] = {}  # without a first token, in the order of arrival
        self._begun: dict[str, _Queued] = {}
        self._report: tuple[SchedulerStats, float, float] | None = None
        self._news: list[Callable[[], object]] = []
        self._num_waiting = 0
        self._known_until_s = -1.0

    def note_update(self, update: CacheUpdate) -> None:
        """The cache has changed."""
        self._news.append(partial(self._index.apply, 0, update))

    def note_first(self, request_id: str, time_s: float) -> None:
        """The first token of a request has come."""
        self._news.append(partial(self._begin, request_id, time_s))

    def note_tokens(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """A step has computed these."""
        self._news.append(partial(self._count, outputs))

    def note_end(self, request_id: str, num_output_tokens: int) -> None:
        """A request has ended."""
        self._news.append(partial(self._end, request_id, num_output_tokens))

    def note_refusal(self, request_id: str) -> None:
        """A request was refused: from now on it is no part of the queue, and it has no answer."""
        refused = self._queued.pop(request_id)
        self._index.settle(0, refused.prompt_number, refused.keys)
        self._predictor.known_places = None

    def report(self, stats: SchedulerStats, began_s: float, end_s: float) -> None:
        """A step has ended; requests that came during it do not know that yet, and none of its results."""
        self._report = stats, began_s, end_s

    def publish(self) -> None:
        """Makes the notes since the last call visible; all earlier requests are known."""
        for take in self._news:
            take()
        self._news.clear()
        if self._report is not None:
            stats, began_s, end_s = self._report
            self._predictor.observe(stats, end_s, end_s - began_s)
            self._num_waiting, self._known_until_s = stats.num_waiting, began_s
            self._report = None

    def submit(self, request_id: str, token_ids: Sequence[int], arrival_s: float) -> None:
        """Predicts a request that comes now."""
        keys = segment_keys(token_ids, self._block_size, "", len(token_ids))
        num_found = self._index.find(keys)[0] * segment_blocks(self._block_size) * self._block_size
        num_tokens = max(len(token_ids) - num_found, 1)
        queued = _Queued(len(token_ids), num_tokens, arrival_s, self._index.expect(0, keys), keys)
        prediction = self._predictor.predict(self._before(), num_tokens, arrival_s, self._progress, len(self._queued))
        if prediction is not None:
            queued.predicted_s = prediction.ttft_s
        if self._predictor.known_places is not None:
            self._predictor.known_places.add(_progress_of(queued))
        self._predictor.note_arrival(num_tokens, arrival_s)
        self._queued[request_id] = queued

    def _progress(self, _: int) -> list[RequestProgress]:
        """All requests in flight: the reports of a simulation have only a part of those that wait."""
        return [_progress_of(one) for one in chain(self._begun.values(), self._queued.values())]

    def _count(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            one = self._begun.get(output.request_id)
            if one is not None:
                one.num_output_tokens += len(output.new_token_ids)

    def _begin(self, request_id: str, time_s: float) -> None:
        queued = self._begun[request_id] = self._queued.pop(request_id)
        if queued.predicted_s is None:
            self._errors.num_unpredicted += 1
        else:
            self._errors.predicted_s.append(queued.predicted_s)
            self._errors.real_s.append(time_s - queued.arrival_s)

    def _end(self, request_id: str, num_output_tokens: int) -> None:
        queued = self._begun.pop(request_id, None) or self._queued.pop(request_id, None)
        if queued is not None:
            self._index.settle(0, queued.prompt_number, queued.keys)
        self._predictor.answer_lengths.observe(num_output_tokens)

    def _before(self) -> QueuedTokens:
        """The waiting requests: the last ones that the report knew, and those that have come since."""
        end_s, num_reported = self._predictor.load.end_s, self._num_waiting
        num_waiting = num_coming = num_requests = 0
        coming_s = 0.0
        for queued in islice(reversed(self._queued.values()), _MAX_COUNTED):
            if queued.arrival_s <= self._known_until_s:
                if not num_reported:
                    break  # it runs
                num_reported -= 1
            if queued.arrival_s > end_s:
                num_coming += queued.num_tokens
                coming_s = queued.arrival_s
            else:
                num_waiting += queued.num_tokens
            num_requests += 1
        return QueuedTokens(num_waiting, num_coming, num_requests, 0, coming_s)


def _progress_of(one: _Queued) -> RequestProgress:
    """A request of a trace asks for nothing: it stops by itself, at an unknown token."""
    return RequestProgress(one.num_prompt_tokens, one.num_output_tokens, _MAX_OUTPUT_TOKENS, can_stop=True)
