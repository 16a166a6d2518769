"""The requests of an engine core whose KV blocks are exported or imported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final, NamedTuple

from llmstack_core_scheduler.request import prefix_salt
from llmstack_engine_core.kv_transfer.config import KVTransferConfig
from llmstack_engine_core.kv_transfer.tag import KVTransferError, TagMaker
from llmstack_engine_core.protocols import KVTransfer, TransferRunner
from llmstack_engine_core.stages import AbsentStage, Ready, Stage
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
)

logger = logging.getLogger(__name__)

MAX_NUM_WAITING: Final = 1024
"""Requests that wait for their blocks; those that come then are computed."""
NO_TRANSFERS: Final = AbsentStage("The engine core exchanges no KV blocks.", "kv_transfer_params")
_NUM_THREADS: Final = 2
_EXPORTING_REASONS: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class TransferParts(NamedTuple):
    """The parts that transfers need besides the scheduler."""

    config: KVTransferConfig
    transfer: KVTransfer
    runner: TransferRunner
    tags: TagMaker


class _Arriving(NamedTuple):
    request: EngineCoreRequest
    blocks: Future[memoryview]
    deadline_s: float


class RequestTransfers(Stage):
    """Exports the prompts of finished requests, and holds requests until their blocks have arrived.

    Others overtake those that wait. Whatever goes wrong with an import, the request is then computed as any other.
    """

    def __init__(self, parts: TransferParts, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._transfer, self._runner, self._tags = parts
        self._scheduler = scheduler
        self._clock = clock
        self._block_size = parts.tags.ready.block_size
        self._exporting: dict[str, EngineCoreRequest] = {}
        self.waiting: dict[str, _Arriving] = {}
        self._num_imported: dict[str, int] = {}  # tokens of requests whose first output has not come
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "import-kv")

    def follow_weights(self, ready: EngineReady) -> None:
        """Exports of the weights before stay, under their tags."""
        self._tags = replace(self._tags, ready=ready)

    @property
    def is_in_use(self) -> bool:
        """Whether requests wait for their blocks, have just got them, or are to be exported."""
        return bool(self.waiting or self._num_imported or self._exporting)

    def check(self, request: EngineCoreRequest) -> None:
        """Refuses what this engine core's role does not include.

        Raises:
            InvalidRequestError: Names the field.
        """
        params = request.kv_transfer
        if params is None:
            return
        is_allowed = (not params.do_remote_decode or self._config.can_export) and (
            not params.do_remote_prefill or self._config.can_import
        )
        if not is_allowed:
            role = self._config.kv_role
            raise InvalidRequestError(f"The role {role} does not include this.", param="kv_transfer_params")
        if request.pooling_params is not None or (params.do_remote_decode and request.sampling_params.use_beam_search):
            raise InvalidRequestError("Only plain completions are transferred.", param="kv_transfer_params")

    def hold(self, request: EngineCoreRequest) -> bool:
        """Notes a request whose prompt is exported at its end; True if the request waits for blocks from now on."""
        params = request.kv_transfer
        if params is None:
            return False
        if params.do_remote_decode:
            self._exporting[request.request_id] = request
        if not params.do_remote_prefill:
            return False
        self._num_imported[request.request_id] = 0
        num_tokens = params.num_tokens
        if not params.remote_engine_id or num_tokens < 1 or num_tokens % self._block_size:
            return self._give_up(request, "the parameters name no export")
        if num_tokens >= len(request.prompt_token_ids):
            return self._give_up(request, "the prompt has fewer tokens than the export")
        if len(self.waiting) >= MAX_NUM_WAITING:
            return self._give_up(request, "too many requests wait for their blocks")
        tag, num_bytes = self._tags.tag(request, num_tokens), self._tags.num_bytes(num_tokens)
        blocks = self._threads.submit(
            self._transfer.import_blocks, params.remote_engine_id, params.transfer_id, tag, num_bytes
        )
        deadline_s = self._clock() + self._config.kv_connector_extra_config.import_timeout_s
        self.waiting[request.request_id] = _Arriving(request, blocks, deadline_s)
        return True

    def take_ready(self, wait_s: float) -> list[Ready]:
        """The requests that wait no longer, their blocks imported where those came; waits at most `wait_s` for one."""
        if wait_s and self.waiting:
            wait([one.blocks for one in self.waiting.values()], wait_s, FIRST_COMPLETED)
        now_s = self._clock()
        ready = [one for one in self.waiting.values() if one.blocks.done() or one.deadline_s <= now_s]
        for request, blocks, _ in ready:
            del self.waiting[request.request_id]
            self._import(request, blocks)
        return [(one.request, None) for one in ready]

    def update(self, step_outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """The outputs, those of finished requests with what another engine core needs; before the next step.

        The first output of a request that named an export has the number of imported tokens.
        """
        if not self._exporting and not self._num_imported:
            return step_outputs
        outputs = [self._exported(self._with_imported(output)) for output in step_outputs.outputs]
        return step_outputs._replace(outputs=outputs)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended."""
        for request_id in request_ids:
            self._exporting.pop(request_id, None)
            self._num_imported.pop(request_id, None)
            arriving = self.waiting.pop(request_id, None)
            if arriving is not None:
                arriving.blocks.cancel()

    def shutdown(self) -> None:
        """Drops exports, and what is arriving."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._transfer.close()

    def _import(self, request: EngineCoreRequest, blocks: Future[memoryview]) -> None:
        params = request.kv_transfer
        if params is None:
            return
        if not blocks.done():
            blocks.cancel()
            self._give_up(request, "they came too late")
            return
        error = blocks.exception()
        if error is not None:
            if not isinstance(error, KVTransferError):
                logger.error("an import failed", exc_info=error)
            self._give_up(request, str(error) if isinstance(error, KVTransferError) else type(error).__name__)
            return
        data, num_tokens = blocks.result(), params.num_tokens
        # One token more than the blocks hold, since a lookup leaves the last one to compute.
        token_ids = request.prompt_token_ids[: num_tokens + 1]
        block_ids, state_id = self._scheduler.import_prefix(token_ids, self._salt(request))
        if block_ids or state_id:
            first = num_tokens // self._block_size - len(block_ids)
            self._runner.write_kv_blocks(block_ids, data, first, state_id)
            self._num_imported[request.request_id] = len(block_ids) * self._block_size

    def _with_imported(self, output: EngineCoreOutput) -> EngineCoreOutput:
        if output.num_cached_tokens < 0 or output.request_id not in self._num_imported:
            return output
        num_tokens = min(self._num_imported.pop(output.request_id), output.num_cached_tokens)
        return output._replace(kv_transfer=KVTransferParams(do_remote_prefill=True, num_tokens=num_tokens))

    def _exported(self, output: EngineCoreOutput) -> EngineCoreOutput:
        request = self._exporting.get(output.request_id)
        if request is None or output.finish_reason not in _EXPORTING_REASONS:
            return output
        del self._exporting[output.request_id]
        block_ids, state_id = self._scheduler.cached_prefix(request.prompt_token_ids, self._salt(request))
        num_tokens = len(block_ids) * self._block_size
        if not num_tokens:
            return output
        transfer_id = self._transfer.export_blocks(
            self._tags.tag(request, num_tokens),
            self._tags.num_bytes(num_tokens),
            lambda out: self._runner.read_kv_blocks(block_ids, out, state_id),
        )
        if transfer_id is None:
            logger.warning("the prompt of request %s is not exported: no room", request.request_id[:64])
            return output
        engine_id = self._transfer.engine_id
        return output._replace(kv_transfer=KVTransferParams(False, True, engine_id, transfer_id, num_tokens))

    def _give_up(self, request: EngineCoreRequest, reason: str) -> bool:
        logger.warning("the prompt of request %s is computed, not imported: %s", request.request_id[:64], reason)
        return False

    def _salt(self, request: EngineCoreRequest) -> str:
        return prefix_salt(request.cache_salt, request.lora_name)
