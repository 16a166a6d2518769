"""`ParallelRunner`: one model runner to the engine core, several ranks behind it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic, sleep

from llmstack_kernels.collective import CollectiveError
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.messages import (
    MESSAGES,
    Answer,
    BlocksMessage,
    Call,
    CallMessage,
    Failure,
    MasksMessage,
    Message,
    StepMessage,
)
from llmstack_parallel.peers import start_peers
from llmstack_parallel.protocols import Peers
from llmstack_parallel.rank_blocks import RankParts, block_sizes, receive_part, writes
from llmstack_parallel.rank_loop import START_TIMEOUT_S
from llmstack_parallel.rank_weights import RankWeights
from llmstack_parallel.topology import Topology
from llmstack_types import (
    EngineStartError,
    KVCacheSpec,
    ModelRunnerConfig,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from llmstack_types.token_masks import NO_DRAFTS_MADE, MakeTokenMasks

logger = logging.getLogger(__name__)

_CAUSE_TIMEOUT_S = 1.0
_CAUSE_INTERVAL_S = 0.01

MakePeers = Callable[[ModelRunnerConfig], Peers]
_POLL_MS = 100


class ParallelRunner(RankWeights):
    """Rank 0 of a model, which lives in the engine core's process and drives the others; used by one thread.

    Every rank gets every step, and computes its part when the ranks before it have computed theirs. Ranks with logits
    sample for themselves: draws depend on seed and place alone, so all of them have the same tokens.

    With several stages `execute_model` only sends a step; rank 0, which is in the last stage, computes its part when
    the result is asked for. Until then the first stage may have begun the next steps.
    """

    def __init__(self, config: ModelRunnerConfig, make_peers: MakePeers | None = None) -> None:
        """Stores the configuration; `load_model` starts the other ranks.

        `make_peers` replaces the processes in tests.
        """
        self._config = config
        self._topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
        self._make_peers = make_peers or start_peers
        self._peers: Peers | None = None
        self._runner: ModelRunner | None = None
        self._num_steps = 0
        self._bytes_per_block: list[int] = []
        self._bytes_per_state: list[int] = []
        self._unsent: list[list[list[int]]] = []
        self._pending: list[_PendingStep] = []
        self._fence: str | None = None

    def load_model(self) -> None:
        """Starts the other ranks, and reads the weights in all of them.

        Raises:
            ValueError: The model cannot be run, or not by that many ranks.
            EngineStartError: A file is missing or damaged, or a rank could not be started.
        """
        self._peers = peers = self._make_peers(self._config)
        own = peers.exchange.sharding(is_expert_parallel=self._config.enable_expert_parallel)
        self._runner = ModelRunner(self._config, sharding=own)
        peers.exchange.set_timeout(START_TIMEOUT_S)
        others = self._call_all(self._runner.load_model, Call.LOAD_MODEL)
        sizes = [block_sizes(self._runner.kv_cache_spec()), *others]
        self._bytes_per_block, self._bytes_per_state = ([size[i] for size in sizes] for i in range(2))
        logger.info(
            "ranks: tensor_parallel_size %d, pipeline_parallel_size %d; they exchange data by %s",
            self._topology.tensor_parallel_size, self._topology.pipeline_parallel_size, type(peers.exchange).__name__,
        )  # fmt: skip

    def kv_cache_spec(self) -> KVCacheSpec:
        """Shape of rank 0's KV storage, with the bytes of the ranks that need the most for a block, and for a state."""
        spec = self._started[1].kv_cache_spec()
        size = max(self._bytes_per_block) or spec.bytes_per_block  # that of the books where nothing keeps keys
        size += spec.draft_bytes_per_block
        return replace(spec, bytes_per_block=size, bytes_per_state=max(self._bytes_per_state))

    def available_kv_bytes(self, *, is_size_given: bool = False) -> int:
        """Memory for the KV storage of each rank: that of the rank with the least."""
        own = []

        def measure() -> None:
            own.append(self._started[1].available_kv_bytes(is_size_given=is_size_given))

        others = self._call_all(measure, Call.AVAILABLE_KV_BYTES, int(is_size_given))
        return min([*own, *(numbers[0] for numbers in others)])

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0, num_state_blocks: int = 0) -> None:
        """Allocates the KV storage of all ranks, and warms them up together."""
        peers, runner = self._started
        sizes = (num_blocks, num_host_blocks, num_state_blocks)
        self._call_all(lambda: runner.initialize_kv_cache(*sizes), Call.INITIALIZE_KV_CACHE, *sizes)
        peers.exchange.set_timeout(self._config.rank_timeout_s)

    def execute_model(self, scheduled: SchedulerOutput, token_masks: MakeTokenMasks | None = None) -> _PendingStep:
        """Sends a step to all ranks and starts it.

        Raises:
            LostRankError: A rank has ended or does not answer.
        """
        peers, _ = self._started
        self.check_processes()
        sampled, self._unsent = self._unsent, []
        number, self._num_steps = self._num_steps, self._num_steps + 1
        frame = MESSAGES.encode(StepMessage(number, scheduled, token_masks is not None, sampled), peers.epoch)
        self._send(peers.channels, frame)
        masks = None if token_masks is None else self._share_masks(number, token_masks)
        pending = _PendingStep(self, scheduled, masks)
        self._pending.append(pending)
        # Masks are made from the tokens of earlier steps, so such a step is not delayed.
        if self._topology.pipeline_parallel_size == 1 or masks is not None:
            self._compute_until(pending)
        return pending

    def _share_masks(self, number: int, token_masks: MakeTokenMasks) -> MakeTokenMasks:
        def make(drafts_made: Mapping[str, Sequence[int]] = NO_DRAFTS_MADE, /) -> TokenMasks:
            masks = token_masks(drafts_made)
            peers, _ = self._started
            frame = MESSAGES.encode(MasksMessage(number, masks), peers.epoch)
            self._send([rank for rank in peers.channels if self._topology.is_sampling(rank)], frame)
            return masks

        return make

    def _compute_until(self, last: _PendingStep) -> None:
        """Computes rank 0's part of the steps up to one of them, in their order."""
        peers, runner = self._started
        while last.output is None:
            pending = self._pending.pop(0)
            try:
                output = runner.execute_model(pending.scheduled, pending.token_masks).result()
                peers.exchange.check()
            except CollectiveError as error:
                raise LostRankError(self._describe_loss(str(error))) from error
            except RuntimeError as error:
                self.check_processes()  # torch.distributed has errors of many kinds
                raise error
            pending.output = output
            if self._topology.pipeline_parallel_size > 1 and pending.scheduled.scheduled_requests:
                self._unsent.append(output.sampled_token_ids)

    def kv_block_form(self) -> tuple[int, int, str]:
        """Bytes of a block and of a state in all ranks, and what distinguishes them from those of one process."""
        return self._parts.form()

    @property
    def _parts(self) -> RankParts:
        return RankParts(self._topology, self._bytes_per_block, self._bytes_per_state)

    def read_kv_blocks(self, block_ids: Sequence[int], out: memoryview, state_id: int = 0) -> None:
        """Copies the blocks of all ranks into `out`, and a state unless it is 0, after all steps that were started.

        Raises:
            ValueError: `out` has another size.
            LostRankError: A rank does not answer.
        """
        peers, runner = self._started
        self._settle()
        with self._parts.split(out, len(block_ids), has_state=state_id > 0) as parts:
            message = BlocksMessage(tuple(block_ids), state_id=state_id)
            self._send(peers.channels, MESSAGES.encode(message, peers.epoch))
            if parts[0].nbytes:
                runner.read_kv_blocks(block_ids, parts[0], state_id)
            deadline_s = monotonic() + self._config.rank_timeout_s
            for rank in peers.channels:
                receive_part(parts[rank], lambda rank=rank: self._receive(rank, deadline_s))  # type: ignore[misc]

    def write_kv_blocks(self, block_ids: Sequence[int], data: memoryview, first: int = 0, state_id: int = 0) -> None:
        """Copies the last blocks of `data`, from number `first` on, into those of all ranks, then a state unless 0.

        Raises:
            ValueError: `data` has another size.
            LostRankError: A rank takes no message.
        """
        peers, runner = self._started
        self._settle()
        with self._parts.split(data, first + len(block_ids), has_state=state_id > 0) as parts:
            for rank in peers.channels:
                for message in writes(block_ids, first, parts[rank], state_id):
                    self._send([rank], MESSAGES.encode(message, peers.epoch))
            if parts[0].nbytes:
                runner.write_kv_blocks(block_ids, parts[0], first, state_id)

    def backends(self) -> Mapping[str, str]:
        """Operation to implementation, of rank 0, and how the ranks exchange data."""
        peers, runner = self._started
        topology = self._topology
        ranks = f"{topology.tensor_parallel_size} per stage, {topology.pipeline_parallel_size} stages"
        return {**runner.backends(), "ranks": f"{ranks}, {type(peers.exchange).__name__}"}

    def sleep(self, level: int) -> None:
        """Frees the KV storage of all ranks, and with level 2 the weights."""
        runner = self._started[1]
        self._call_all(lambda: runner.sleep(level), Call.SLEEP, level)

    def wake_up(self) -> None:
        """Restores in all ranks what `sleep` freed."""
        peers, runner = self._started
        peers.exchange.set_timeout(START_TIMEOUT_S)
        self._call_all(runner.wake_up, Call.WAKE_UP)
        peers.exchange.set_timeout(self._config.rank_timeout_s)

    def shutdown(self) -> None:
        """Ends all ranks. Idempotent."""
        peers, self._peers = self._peers, None
        runner, self._runner = self._runner, None
        if peers is not None:
            peers.stop(is_over=_is_over(sys.exc_info()[1], has_started=bool(self._bytes_per_block)))
        if runner is not None:
            runner.shutdown()
        if peers is not None:
            peers.exchange.close()

    @property
    def _started(self) -> tuple[Peers, ModelRunner]:
        if self._peers is None or self._runner is None:
            raise LostRankError("the ranks are not started, or have been ended")
        return self._peers, self._runner

    def _call_all(self, own: Callable[[], None], call: Call, *arguments: int) -> list[tuple[int, ...]]:
        """Calls a method in all ranks at once; the answers of the others."""
        peers, _ = self._started
        self.check_processes()
        frame = MESSAGES.encode(CallMessage(call, arguments), peers.epoch)
        self._send(peers.channels, frame)
        try:
            own()
        except CollectiveError:
            self._answers(self._config.rank_timeout_s)  # a rank that failed says why
            raise
        return self._answers(START_TIMEOUT_S)

    def _answers(self, timeout_s: float) -> list[tuple[int, ...]]:
        """The answers of all other ranks to a call; each answers each call."""
        answers = self._receive_all(timeout_s)
        for rank, answer in zip(self._started[0].channels, answers, strict=True):
            if isinstance(answer, Failure):
                raise EngineStartError(f"{self._topology.describe(rank)}: {answer.reason}")
        return [answer.numbers for answer in answers]

    def _receive_all(self, timeout_s: float) -> list[Answer | Failure]:
        """The answers of the other ranks within the time, from now on.

        Raises:
            LostRankError: A rank has ended, or does not answer. No later call reaches the ranks: a late answer would be
                taken for its own.
        """
        peers, _ = self._started
        found: list[Answer | Failure] = []
        deadline_s = monotonic() + timeout_s
        for rank in peers.channels:
            answer = self._receive(rank, deadline_s, f" within {timeout_s:g} s")
            if not isinstance(answer, Answer | Failure):
                raise LostRankError(f"{self._topology.describe(rank)} sent a {type(answer).__name__}")
            found.append(answer)
        return found

    def _receive(self, rank: int, deadline_s: float, limit: str = "") -> Message:
        peers, _ = self._started
        while (frame := self._poll(rank)) is None:
            self.check_processes()
            if monotonic() > deadline_s:
                self._fence = f"{self._topology.describe(rank)} has not answered a call{limit}"
                peers.exchange.abort()
                raise LostRankError(self._fence)
        return MESSAGES.decode(frame, peers.epoch)[1]

    def _poll(self, rank: int) -> bytes | None:
        try:
            return self._started[0].channels[rank].receive(_POLL_MS)
        except LostRankError as error:
            raise LostRankError(self._describe_loss(str(error))) from error

    def _settle(self) -> None:
        """Computes rank 0's part of all steps that were started: other ranks wait for it before they answer."""
        if self._pending:
            self._compute_until(self._pending[-1])

    def check_processes(self) -> None:
        """Looks whether the other ranks run; raises LostRankError where one has ended."""
        if lost := self._started[0].lost() or self._fence:
            raise LostRankError(lost)

    def _send(self, ranks: Iterable[int], frame: bytes) -> None:
        channels = self._started[0].channels
        try:
            for rank in ranks:
                channels[rank].send(frame)
        except LostRankError as error:
            raise LostRankError(self._describe_loss(str(error))) from error

    def _describe_loss(self, reason: str) -> str:
        """Why a rank does not answer; what watches the ranks may say so a moment later."""
        deadline_s = monotonic() + _CAUSE_TIMEOUT_S
        while (lost := self._started[0].lost()) is None and monotonic() < deadline_s:
            sleep(_CAUSE_INTERVAL_S)
        return lost or f"a rank does not answer: {reason}"


class _PendingStep:
    """A step under way in the ranks."""

    __slots__ = ("_runner", "output", "scheduled", "token_masks")

    def __init__(self, runner: ParallelRunner, scheduled: SchedulerOutput, token_masks: MakeTokenMasks | None) -> None:
        self.scheduled, self.token_masks = scheduled, token_masks
        self.output: ModelRunnerOutput | None = None
        self._runner = runner

    def result(self) -> ModelRunnerOutput:
        """Computes rank 0's part if that is left to do; repeated calls return the same."""
        self._runner._compute_until(self)
        if self.output is None:
            raise LostRankError("the step has no results")
        return self.output


def _is_over(error: BaseException | None, *, has_started: bool) -> bool:
    """Whether ranks end for good; after an error in a step another engine core is about to take their place."""
    if error is None or not isinstance(error, Exception):
        return True
    return not has_started and isinstance(error, EngineStartError | ValueError)
