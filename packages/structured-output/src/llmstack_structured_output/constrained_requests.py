"""The constrained requests of an engine by id, and the masks of a step for them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLExecutor

from llmstack_structured_output.compiler import GrammarCompiler, normal_form
from llmstack_structured_output.cost import expected_seconds
from llmstack_structured_output.errors import one_line
from llmstack_structured_output.matcher import Matcher
from llmstack_structured_output.work import SLOW_S, Work
from llmstack_types import LLMStackError, StructuredOutputsParams

_WORD_BYTES = 4
_MAX_THREADS = 8
# Beside other programs a thread that is woken may take 9 ms to begin; 32 rows of rare tokens take 0.4 ms.
_TIME_ALONE_S = 0.001
# A longer call of all threads has a slow text among its rows, or one of them waited for the processor.
_TIME_TOGETHER_S = 0.005
_TIME_OF_ROW_S = 0.0002
_TOO_SLOW = "following the text takes too much processor time; its grammar may be ambiguous"


class ConstraintFailedError(LLMStackError):
    """The output of a request cannot be constrained any longer; the text says why."""


@dataclass(slots=True)
class _Request:
    matcher: Matcher
    min_tokens: int
    work: Work = field(default_factory=Work)

    def check(self) -> None:
        """Raises ConstraintFailedError where no further token can be constrained."""
        if self.matcher.handle.is_error():
            raise ConstraintFailedError(one_line(self.matcher.error))
        if self.work.is_spent:
            raise ConstraintFailedError(_TOO_SLOW)


_Row = tuple[_Request, Sequence[int], int]
"""A request, its draft tokens, and the place of its first mask. No class: making 32 takes as long as three masks."""


class ConstrainedRequests:
    """Satisfies the engine core's Protocol `ConstraintBackend`.

    `compile` may run in several threads; everything else belongs to one.
    """

    def __init__(self, tokenizer_folder: str, vocab_size: int, num_threads: int | None = None) -> None:
        """Reads nothing yet. `num_threads`: Of those that compute masks; None is as many as there are processors."""
        self.mask_bytes = -(-vocab_size // (8 * _WORD_BYTES)) * _WORD_BYTES
        self._folder = Path(tokenizer_folder)
        self._vocab_size = vocab_size
        self._num_threads = num_threads or min(_num_processors(), _MAX_THREADS)
        self._executor: LLExecutor | None = None
        self._compilers: dict[tuple[int, ...], GrammarCompiler] = {}
        self._eos_token_ids: tuple[int, ...] = ()
        self._requests: dict[str, _Request] = {}

    def expected_seconds(self, params: StructuredOutputsParams) -> float:
        """A rough estimate of the seconds to compile a constraint, by its size and shape."""
        return expected_seconds(normal_form(params))

    def compile(self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...]) -> None:
        """Compiles a constraint, so that `start` finds it in the cache.

        Raises:
            InvalidRequestError: It cannot be compiled.
        """
        self._compiler(eos_token_ids).compile(params)

    def start(
        self, request_id: str, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], min_tokens: int = 0
    ) -> None:
        """Begins to follow a request under a constraint; compiles it where that has not been done.

        Args:
            request_id: Not in use.
            params: The constraint.
            eos_token_ids: Tokens that may end the text; the same for all requests.
            min_tokens: Before so many tokens the text does not end, unless nothing else may follow.

        Raises:
            InvalidRequestError: The constraint cannot be compiled; nothing has begun.
        """
        grammar = self._compiler(eos_token_ids).compile(params)
        self._eos_token_ids = eos_token_ids
        self._requests[request_id] = _Request(grammar.new_matcher(), min_tokens)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Advances a request by the tokens it generated; unknown ids are ignored.

        Raises:
            ConstraintFailedError: A token was not allowed, or took more work than the limits permit.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if not request.work.call(request.matcher.accept, token_ids):
            raise ConstraintFailedError(one_line(request.matcher.error))
        request.work.earn(len(token_ids))
        request.check()

    def masks(self, rows: Sequence[tuple[str, Sequence[int]]]) -> bytearray:
        """Masks of the next tokens of each request, and of the tokens after each draft token.

        Returns one mask for each request and one more for each draft, in the order of `rows`, `mask_bytes` each: token
        t is bit t % 8, counted from the lowest, of byte t // 8. Behind a draft that is not allowed, anything is.

        Args:
            rows: Request id and draft tokens; the ids are distinct and followed.

        Raises:
            ConstraintFailedError: The text of a row cannot be followed, or takes more work than the limits permit.
        """
        placed: list[_Row] = []
        num_places = 0
        for request_id, drafts in rows:
            placed.append((self._requests[request_id], drafts, num_places))
            num_places += 1 + len(drafts)
        bits = bytearray(b"\xff") * (num_places * self.mask_bytes)
        if placed:
            self._fill(placed, bits, num_places)
        for request, drafts, place in placed:
            request.check()
            if request.min_tokens > request.matcher.num_tokens:
                self._bar_early_ends(request, 1 + len(drafts), place, bits)
        return bits

    def end(self, request_id: str) -> None:
        """Forgets a request; unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._requests)

    def _fill(self, rows: Sequence[_Row], bits: bytearray, num_places: int) -> None:
        """Alone as long as that takes no time; waking other threads would take longer than most masks do."""
        address, mask_bytes = ctypes.addressof(ctypes.c_char.from_buffer(bits)), self.mask_bytes
        watched, left = [], []
        clock = time.perf_counter
        now_s = clock()
        end_s = now_s + _TIME_ALONE_S
        for row in rows:
            request, drafts, place = row
            if request.work.is_watched:
                watched.append(row)
            elif drafts or now_s > end_s:
                left.append(row)
            else:
                request.matcher.handle.unsafe_compute_mask_ptr(address + place * mask_bytes, mask_bytes)
                start_s, now_s = now_s, clock()  # the end of one row is the start of the next
                request.work.is_watched = now_s - start_s > SLOW_S
        for row in watched:
            self._fill_watched(row, address, num_places)
        if left:
            start_s = clock()
            self._fill_together(left, address, num_places)
            if clock() - start_s > max(_TIME_TOGETHER_S, _TIME_OF_ROW_S * len(left)):
                for request, _, _ in left:
                    request.work.is_watched = True

    def _fill_watched(self, row: _Row, address: int, num_places: int) -> None:
        """Fills the mask of one row by itself, so that its processor time is known."""
        request, drafts, place = row
        if drafts:
            request.work.call(self._fill_together, [row], address, num_places, clock=time.process_time)
        else:
            target = address + place * self.mask_bytes
            request.work.call(request.matcher.handle.unsafe_compute_mask_ptr, target, self.mask_bytes)
        request.work.end_watch()

    def _fill_together(self, rows: Sequence[_Row], address: int, num_places: int) -> None:
        plain = [(request.matcher.handle, place) for request, drafts, place in rows if not drafts]
        drafted = [(request.matcher.handle, place, list(drafts)) for request, drafts, place in rows if drafts]
        if plain:
            self._pool().unsafe_compute_mask_ptr(plain, address, self.mask_bytes, num_places)
        if drafted:
            self._pool().unsafe_compute_mask_ptr_with_draft_token(drafted, address, self.mask_bytes, num_places)

    def _bar_early_ends(self, request: _Request, num_places: int, first: int, bits: bytearray) -> None:
        """The library knows nothing of `min_tokens`."""
        num_early = request.min_tokens - request.matcher.num_tokens
        for place in range(first, first + min(num_early, num_places)):
            self._bar_end(bits, place * self.mask_bytes)

    def _bar_end(self, bits: bytearray, start: int) -> None:
        mask = bits[start : start + self.mask_bytes]
        for token_id in self._eos_token_ids:
            mask[token_id >> 3] &= ~(1 << (token_id & 7))
        if any(mask):
            bits[start : start + self.mask_bytes] = mask

    def _compiler(self, eos_token_ids: tuple[int, ...]) -> GrammarCompiler:
        # One model has one set of ids, so there is one compiler.
        compiler = GrammarCompiler(self._folder, self._vocab_size, eos_token_ids)
        return self._compilers.setdefault(eos_token_ids, compiler)

    def _pool(self) -> LLExecutor:
        if self._executor is None:
            self._executor = LLExecutor(num_threads=self._num_threads)
        return self._executor


def _num_processors() -> int:
    """The processors that the process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
