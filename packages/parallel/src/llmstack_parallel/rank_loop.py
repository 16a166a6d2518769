"""The loop of a rank: calls and steps, in the order in which they come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from llmstack_engine_core.messages.kinds import CodecError
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_parallel.messages import (
    MESSAGES,
    AdapterCall,
    AdapterMessage,
    Answer,
    BlocksMessage,
    Call,
    CallMessage,
    Failure,
    MasksMessage,
    Message,
    StepMessage,
    TextsMessage,
    WeightsMessage,
)
from llmstack_parallel.protocols import Channel, Exchange
from llmstack_parallel.rank_blocks import block_sizes, reads
from llmstack_types import LLMStackError, ModelRunnerConfig, TokenMasks
from llmstack_types.token_masks import NO_DRAFTS_MADE, MakeTokenMasks

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""How long ranks wait for each other while they load and warm up: kernels may be compiled then."""


class RankLoop:
    """One rank. An error in a step ends it, and with it the engine core: the ranks would no longer agree."""

    def __init__(self, config: ModelRunnerConfig, channel: Channel, exchange: Exchange, epoch: int) -> None:
        self._config = config
        self._channel = channel
        self._exchange = exchange
        self._epoch = epoch
        self._sharding: Sharding = exchange.sharding(is_expert_parallel=config.enable_expert_parallel)
        self._runner = ModelRunner(config, sharding=self._sharding)
        self._num_steps = 0
        self._blocks = bytearray()  # what has come of those that are written
        self._reader = ThreadPoolExecutor(1, "read-beside")
        self._reads: dict[str, Future[object]] = {}
        self._texts: Future[None] | None = None

    def run(self) -> None:
        """Serves until a message ends it.

        Raises:
            CodecError: A frame is no message of this epoch.
            Exception: A step failed.
        """
        while self._handle(self._receive()):
            pass

    def shutdown(self) -> None:
        """Releases the device and the memory shared with other ranks."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._runner.shutdown()
        self._exchange.close()

    def _receive(self) -> Message:
        frame = self._channel.receive()
        if frame is None:
            raise CodecError("the channel has no message")
        return MESSAGES.decode(frame, self._epoch)[1]

    def _handle(self, message: Message) -> bool:
        """Handles one message; False if it was the last."""
        if isinstance(message, StepMessage):
            self._step(message)
        elif isinstance(message, CallMessage):
            if message.call is Call.END:
                return False
            self._channel.send(MESSAGES.encode(self._answer(message), self._epoch))
        elif isinstance(message, AdapterMessage):
            self._handle_adapter(message)
        elif isinstance(message, TextsMessage):
            self._handle_texts(message)
        elif isinstance(message, WeightsMessage):
            self._channel.send(MESSAGES.encode(self._handle_weights(message.path), self._epoch))
        elif isinstance(message, BlocksMessage):
            self._handle_blocks(message)
        else:
            raise CodecError(f"a rank expects no {type(message).__name__}")
        return True

    def _handle_blocks(self, message: BlocksMessage) -> None:
        if not message.data:
            block_bytes, state_bytes = block_sizes(self._runner.kv_cache_spec())
            found = bytearray(len(message.block_ids) * block_bytes + (state_bytes if message.state_id else 0))
            if found:
                self._runner.read_kv_blocks(message.block_ids, memoryview(found), message.state_id)
            for answer in reads(found):
                self._channel.send(MESSAGES.encode(answer, self._epoch))
            return
        self._blocks += message.data
        if message.is_whole:
            data, self._blocks = self._blocks, bytearray()
            self._runner.write_kv_blocks(message.block_ids, memoryview(data), message.first, message.state_id)

    def _handle_adapter(self, message: AdapterMessage) -> None:
        identity = message.identity
        if message.call is AdapterCall.READ:
            # One is read at a time: what was read before was refused by another rank, or has been added.
            self._reads = {identity: self._reader.submit(self._runner.read_adapter, identity, message.path)}
        elif message.call is AdapterCall.REMOVE:
            self._runner.remove_adapter(identity)
        else:
            self._channel.send(MESSAGES.encode(self._add_adapter(identity), self._epoch))

    def _handle_texts(self, message: TextsMessage) -> None:
        if not message.is_due:
            self._texts = self._reader.submit(self._runner.read_token_texts)
            return
        answer: Answer | Failure = Answer()
        try:
            if self._texts is not None:
                self._texts.result()
        except Exception as error:  # of a file, of any kind: it is none of the rank
            logger.error("the texts of tokens cannot be read", exc_info=error)
            answer = Failure(str(error) or type(error).__name__)
        self._channel.send(MESSAGES.encode(answer, self._epoch))

    def _add_adapter(self, identity: str) -> Answer | Failure:
        reading = self._reads.pop(identity, None)
        if reading is None:
            return Failure("the adapter was not read")
        return tried(lambda: self._runner.add_adapter(identity, reading.result()))

    def _handle_weights(self, path: str) -> Answer | Failure:
        runner = self._runner
        answer = tried(partial(runner.check_weights, path) if path else runner.exchange_weights)
        return Answer(digest=runner.updated_digest) if isinstance(answer, Answer) else answer

    def _answer(self, message: CallMessage) -> Answer | Failure:
        try:
            return Answer(_CALLS[message.call](self, message.arguments))
        except (LLMStackError, ValueError, MemoryError) as error:  # meant for the user, who reads rank 0's log
            logger.debug("the call failed", exc_info=True)
            self._exchange.abort()  # the others may wait for this rank
            return Failure(str(error) or type(error).__name__)

    def _load_model(self, arguments: tuple[int, ...]) -> tuple[int, ...]:
        self._exchange.set_timeout(START_TIMEOUT_S)
        self._runner.load_model()
        return block_sizes(self._runner.kv_cache_spec())

    def _available_kv_bytes(self, arguments: tuple[int, ...]) -> tuple[int, ...]:
        return (self._runner.available_kv_bytes(is_size_given=bool(arguments[0])),)

    def _initialize_kv_cache(self, arguments: tuple[int, ...]) -> tuple[int, ...]:
        self._runner.initialize_kv_cache(*arguments)
        self._exchange.set_timeout(self._config.rank_timeout_s)
        return ()

    def _sleep(self, arguments: tuple[int, ...]) -> tuple[int, ...]:
        self._runner.sleep(arguments[0])
        return ()

    def _wake_up(self, arguments: tuple[int, ...]) -> tuple[int, ...]:
        self._exchange.set_timeout(START_TIMEOUT_S)
        self._runner.wake_up()
        self._exchange.set_timeout(self._config.rank_timeout_s)
        return ()

    def _step(self, message: StepMessage) -> None:
        if message.number != self._num_steps:
            raise CodecError(f"step {message.number} came where step {self._num_steps} was due")
        self._num_steps += 1
        if not self._sharding.is_last_stage:
            for sampled in message.sampled:
                self._runner.append_tokens(sampled)
        masks: MakeTokenMasks | None = None
        if message.has_masks and self._sharding.is_last_stage:
            masks = self._receive_masks
        self._runner.execute_model(message.scheduled, masks).result()
        self._exchange.check()

    def _receive_masks(self, drafts_made: Mapping[str, Sequence[int]] = NO_DRAFTS_MADE, /) -> TokenMasks:
        message = self._receive()
        if not isinstance(message, MasksMessage) or message.number != self._num_steps - 1:
            raise CodecError("the masks of another step came")
        return message.masks


def tried(do: Callable[[], object]) -> Answer | Failure:
    """The answer of a rank that does something; an error of what it was given is no error of the rank."""
    try:
        do()
    except (LLMStackError, ValueError, MemoryError) as error:
        return Failure(str(error) or type(error).__name__)
    return Answer()


_CALLS: dict[Call, Callable[[RankLoop, tuple[int, ...]], tuple[int, ...]]] = {
    Call.LOAD_MODEL: RankLoop._load_model,
    Call.AVAILABLE_KV_BYTES: RankLoop._available_kv_bytes,
    Call.INITIALIZE_KV_CACHE: RankLoop._initialize_kv_cache,
    Call.SLEEP: RankLoop._sleep,
    Call.WAKE_UP: RankLoop._wake_up,
}
