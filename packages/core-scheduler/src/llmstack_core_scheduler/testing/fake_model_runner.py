"""A model runner whose model is a hash function and whose KV cache holds digests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from llmstack_core_scheduler.media_numbers import Numbered
from llmstack_core_scheduler.testing.fake_encoder import FakeEncoder, seen_ids
from llmstack_types import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput


def next_token(token_ids: Sequence[int], vocab_size: int = 1000) -> int:
    """The token that the fake model puts after these: a fixed function of all of them, equal on every machine."""
    return _token_of(_digests(token_ids)[-1], vocab_size)


_Content = tuple[int, int]
"""The content of a slot: the digest of a prefix, and the group of layers that wrote it."""


_BROKEN = (-1, -1)
"""What a row writes that could not be computed."""
_NONSENSE = 999_999


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    digests: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_held_tokens: int = 0
    media: Numbered = ()


class WrongKVError(Exception):
    """A row would have read, through its block table, KV that is not its own prefix; or a row's books are wrong."""


class FakeModelRunner:
    """A model runner whose KV cache holds, in each slot, a digest of the prefix that was written there.

    Before a row samples, everything it would attend to is compared with its own tokens, so that a wrong block table or
    a wrong prefix hit is found in the step in which it would spoil an answer; so is a copy of blocks that was forgotten
    or came in the wrong order. The tokens are those of `next_token`; drafts are accepted as far as they are equal to
    them.

    Args:
        num_blocks: Blocks of the cache.
        block_size: Tokens per block.
        vocab_size: Sampled tokens lie in [0, vocab_size).
        choose_token: Replaces what the fake model says: request id and the tokens so far to the next token.
        num_host_blocks: Blocks of the host's storage.
        error_request_ids: The rows of these requests fail when they would sample.
        sliding_windows: For each group of layers, the tokens that a token attends to; None for all.
        num_state_blocks: Blocks of the states; 0 for a model without states. A state is the digest of all tokens.
        encoder: What encodes the items of prompts; None for a model of tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        choose_token: Callable[[str, Sequence[int]], int] | None = None,
        num_host_blocks: int = 0,
        error_request_ids: Collection[str] = (),
        sliding_windows: Sequence[int | None] = (None,),
        num_state_blocks: int = 0,
        encoder: FakeEncoder | None = None,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._choose_token = choose_token
        self._sliding_windows = tuple(sliding_windows)
        self._slots: list[_Content | None] = [None] * (num_blocks * block_size)
        self._host_slots: list[_Content | None] = [None] * (num_host_blocks * block_size)
        self._states: list[int | None] = [0] + [None] * (num_state_blocks - 1)
        self._has_states = num_state_blocks > 0
        self._error_request_ids = error_request_ids
        self._rows: dict[str, _Row] = {}
        self.encoder = encoder

    @property
    def request_ids(self) -> list[str]:
        """The requests it has rows for."""
        return list(self._rows)

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step.

        Raises:
            WrongKVError: The step would compute nonsense.
        """
        for request_id in scheduled.removed_request_ids:
            del self._rows[request_id]
        for request in scheduled.new_requests:
            self._add(request)
        broken = self._encode(scheduled)
        self._copy(self._slots, self._host_slots, scheduled.swap_outs)
        self._copy(self._host_slots, self._slots, scheduled.swap_ins)
        self._copy(self._slots, self._slots, scheduled.block_copies)
        for row in scheduled.scheduled_requests:
            self._write(row, is_broken=row.request_id in broken)
        if self._has_states:
            self._advance_states(scheduled)
        sampled = [
            self._sample_nonsense(row) if row.request_id in broken else self._attend_and_sample(row)
            for row in scheduled.scheduled_requests
        ]
        request_ids = [row.request_id for row in scheduled.scheduled_requests]
        errors = {
            request_id: "the row fails"
            for request_id, tokens in zip(request_ids, sampled, strict=True)
            if request_id in broken or (tokens and request_id in self._error_request_ids)
        }
        return ModelRunnerOutput(request_ids, sampled, errors=errors)

    def _encode(self, scheduled: SchedulerOutput) -> set[str]:
        """Encodes what the step says; the ids of the rows that read an item without vectors."""
        encoder = self.encoder
        if encoder is None:
            return set()
        encoder.follow(scheduled)
        rows = scheduled.scheduled_requests
        return {row.request_id for row in rows if encoder.fails(row, self._rows[row.request_id].media)}

    def _copy(
        self, sources: list[_Content | None], destinations: list[_Content | None], pairs: Sequence[tuple[int, int]]
    ) -> None:
        size = self._block_size
        for source, destination in pairs:
            content = sources[source * size : (source + 1) * size]
            destinations[destination * size : (destination + 1) * size] = content

    def _add(self, request: NewRequest) -> None:
        if request.request_id in self._rows:
            raise WrongKVError(f"{request.request_id} has a row already")
        seen = seen_ids(request.token_ids, [item for _, item in request.media])
        self._rows[request.request_id] = _Row(
            request.token_ids, _digests(seen), num_held_tokens=request.num_held_tokens, media=request.media
        )

    def _write(self, scheduled: ScheduledRequest, *, is_broken: bool) -> None:
        row = self._rows[scheduled.request_id]
        row.block_ids += scheduled.new_block_ids
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        digests = self._digests_of(row, scheduled)
        if scheduled.num_scheduled_tokens < 1 or end > len(digests):
            raise WrongKVError(f"{scheduled.request_id} computes up to {end} of {len(digests)} tokens")
        if end > len(row.block_ids) // len(self._sliding_windows) * self._block_size:
            raise WrongKVError(f"{scheduled.request_id} has {len(row.block_ids)} blocks for {end} tokens")
        for group in range(len(self._sliding_windows)):
            for position in range(max(scheduled.num_computed_tokens, row.num_held_tokens), end):
                content = _BROKEN if is_broken else (digests[position], group)
                self._slots[self._slot(row, position, group)] = content

    def _advance_states(self, scheduled: SchedulerOutput) -> None:
        """Each row goes on from the state of its own tokens, as an earlier step has left it."""
        targets = [target for _, target in scheduled.states]
        read = {source for source, _ in scheduled.states}
        if len(set(targets)) != len(targets) or not read.isdisjoint(targets) or 0 in targets:
            raise WrongKVError("two rows write one state block, or one reads what another writes")
        for row, (source, target) in zip(scheduled.scheduled_requests, scheduled.states, strict=True):
            start, digests = row.num_computed_tokens, self._rows[row.request_id].digests
            if self._states[source] != (digests[start - 1] if start else 0):
                raise WrongKVError(f"{row.request_id} would go on from another state than that of {start} tokens")
            end = start + row.num_scheduled_tokens - len(row.draft_token_ids)
            self._states[target] = digests[end - 1]

    def _attend_and_sample(self, scheduled: ScheduledRequest) -> list[int]:
        row = self._rows[scheduled.request_id]
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        digests = self._digests_of(row, scheduled)
        for group, window in enumerate(self._sliding_windows):
            first = 0 if window is None else max(scheduled.num_computed_tokens - window + 1, 0)
            for position in range(first, end):
                content = self._slots[self._slot(row, position, group)]
                if content == _BROKEN:  # of a row that fails in this step, so that this one is to fail too
                    self._write(scheduled._replace(new_block_ids=[]), is_broken=True)
                    return self._sample_nonsense(scheduled)
                if content != (digests[position], group):
                    raise WrongKVError(f"{scheduled.request_id} would read something else at position {position}")
        if end < len(row.token_ids):
            return []
        return self._sample(scheduled.request_id, row, scheduled.draft_token_ids)

    def _sample(self, request_id: str, row: _Row, draft_token_ids: Sequence[int]) -> list[int]:
        """The next token, and one more for each draft that was right."""
        sampled: list[int] = []
        for draft_token_id in [*draft_token_ids, None]:
            token_id = _token_of(row.digests[-1], self._vocab_size)
            if self._choose_token is not None:
                token_id = self._choose_token(request_id, row.token_ids)
            row.token_ids.append(token_id)
            row.digests.append(_digest(row.digests[-1], token_id))
            sampled.append(token_id)
            if token_id != draft_token_id:
                break
        return sampled

    def _sample_nonsense(self, scheduled: ScheduledRequest) -> list[int]:
        """Tokens of a row whose prefix is wrong: none that the right prefix would give."""
        row = self._rows[scheduled.request_id]
        if scheduled.num_computed_tokens + scheduled.num_scheduled_tokens < len(row.token_ids):
            return []
        row.token_ids.append(_NONSENSE)
        row.digests.append(0)
        return [_NONSENSE]

    def _digests_of(self, row: _Row, scheduled: ScheduledRequest) -> list[int]:
        """Digests of all known tokens and of the row's drafts."""
        return row.digests + _digests(scheduled.draft_token_ids, row.digests[-1])

    def _slot(self, row: _Row, position: int, group: int) -> int:
        index = position // self._block_size * len(self._sliding_windows) + group
        return row.block_ids[index] * self._block_size + position % self._block_size


def _digest(previous: int, token_id: int) -> int:
    packed = previous.to_bytes(8, "little") + token_id.to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def _digests(token_ids: Sequence[int], digest: int = 0) -> list[int]:
    """A digest of the prefix that ends with each token; `digest` is that of what comes before."""
    digests = []
    for token_id in token_ids:
        digest = _digest(digest, token_id)
        digests.append(digest)
    return digests


def _token_of(digest: int, vocab_size: int) -> int:
    return digest % vocab_size
