"""The stage of requests whose prefixes may be on disk, and are written there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from llmstack_engine_core.disk_cache.prefix_reads import PrefixReads
from llmstack_engine_core.disk_cache.prefix_store import PrefixStore
from llmstack_engine_core.disk_cache.prefix_writes import Cache, PrefixWrites
from llmstack_engine_core.protocols import PendingOutput
from llmstack_engine_core.stages import Execute, PrefixStage, Ready
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    SchedulerOutput,
    SchedulerStats,
)
from llmstack_types.stats import DISK_MISS_CAUSES, DiskCacheStats

IDLE_SLICE_S: Final = 0.02
"""How long blocks are copied in one go while there is no request."""
LAST_WRITES_S: Final = 3.0
"""How long a process that ends writes what is left."""


class StoredPrefixes(PrefixStage):
    """Prefixes of one engine core on disk. Used by the engine core's thread.

    A request whose prefix is there waits for it, and others overtake it. Its text is written once its prompt is
    computed, and again at its end.
    """

    has_stats = True

    def __init__(self, cache: Cache, store: PrefixStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self.waiting: PrefixReads = PrefixReads(cache, store, clock)
        self._writes = PrefixWrites(cache, store, clock)
        self._texts: dict[str, tuple[EngineCoreRequest, list[int]]] = {}  # as far as they are known
        self._is_in_step = self._is_closed = False

    @property
    def is_in_use(self) -> bool:
        """Whether there are requests, or texts of them that wait to be written."""
        return bool(self._texts or self._writes.has_jobs)

    def wants(self, request: EngineCoreRequest) -> bool:
        """Whether the request is a plain completion."""
        params = request.sampling_params
        return request.pooling_params is None and not params.use_beam_search and params.prompt_logprobs is None

    def hold(self, request: EngineCoreRequest) -> bool:
        """True if the request waits for its blocks from now on."""
        text = _text_of(request)
        self._texts[request.request_id] = _without_memory(request), text
        return self.waiting.begin(request, text)

    def noted(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request, with what was in the way of its blocks on disk."""
        cause = self.waiting.causes.pop(request.request_id, "")
        return replace(request, disk_miss=cause) if cause else request

    def take_ready(self, wait_s: float) -> list[Ready]:
        """The requests that wait no longer, their blocks imported as far as they were right."""
        return [(request, None) for request in self.waiting.take_ready(wait_s)]

    def execute(self, execute: Execute, scheduled: SchedulerOutput, *token_masks: object) -> PendingOutput:
        """Starts a step, whose blocks are not written to disk before it has ended."""
        self._is_in_step = True
        return execute(scheduled, *token_masks)

    def update(self, step_outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """The outputs; the first one of a request says how many of its tokens were read from disk."""
        self._is_in_step = False
        return step_outputs._replace(outputs=[self._noted(output) for output in step_outputs.outputs])

    def end_step(self, *, is_idle: bool) -> None:
        """Copies an extent, where one is due."""
        self._writes.copy()

    def distrust(self) -> None:
        """Removes all files: any of them may have been written from wrong values, or hang on one that was."""
        self._writes.clear()

    def follow_weights(self, ready: EngineReady) -> None:
        """Blocks of the weights before are written no more: what has their tokens in memory from now on is another."""
        self._writes.forget()
        self._store.follow_weights(ready)

    def work_when_idle(self) -> None:
        """Copies what is due; the engine core has no request."""
        end_s = time.monotonic() + IDLE_SLICE_S
        while self._writes.copy() and time.monotonic() < end_s:
            pass

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended; their computed blocks are written all the same."""
        for request_id in request_ids:
            self._texts.pop(request_id, None)
        self.waiting.forget(request_ids)

    def abort(self, request_ids: list[str]) -> list[str]:
        """Forgets requests that are aborted, with what they have computed written."""
        for request_id in request_ids:
            request, text = self._texts.get(request_id, (None, []))
            if request is not None and len(text) > len(_text_of(request)):
                self._writes.add(request, text)
        self.forget(request_ids)
        return request_ids

    def add_to(self, stats: SchedulerStats) -> SchedulerStats:
        """The statistics with those of the disk."""
        reads, behind, files = self.waiting, self._writes.behind, self._store.files
        return stats._replace(disk=DiskCacheStats(
            files.num_bytes, reads.num_requests, reads.num_tokens, reads.num_bytes, behind.num_written_bytes,
            behind.num_dropped, tuple(reads.misses[cause] for cause in DISK_MISS_CAUSES),
        ))  # fmt: skip

    def shutdown(self) -> None:
        """Writes what is left for a moment, unless a step has failed. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.waiting.close()
        self._writes.finish(0.0 if self._is_in_step else LAST_WRITES_S)
        self._store.files.close()

    def _noted(self, output: EngineCoreOutput) -> EngineCoreOutput:
        known = self._texts.get(output.request_id)
        if known is None or output.finish_reason is FinishReason.ERROR:
            return output
        request, text = known
        is_first = output.num_cached_tokens >= 0
        if is_first:  # without the new token: as far as the same prompt is looked for
            self._writes.add(request, text.copy())
        text += output.new_token_ids
        if output.finish_reason is not None:
            self._writes.add(request, text.copy())
        if not is_first:
            return output
        num_tokens = self.waiting.take_num_tokens(output.request_id)
        return output._replace(num_disk_tokens=min(num_tokens, output.num_cached_tokens))


def _text_of(request: EngineCoreRequest) -> list[int]:
    return [*request.prompt_token_ids, *request.output_token_ids]


def _without_memory(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request as it is kept beyond its end: pixels and sound are not, which may be many megabytes."""
    if not request.media:
        return request
    return replace(request, media=tuple(replace(item, memory=None) for item in request.media))
