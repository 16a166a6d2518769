"""An engine core over `CacheRunner` with a prefix cache on disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from engine_core_helpers.cache_runner import BLOCK_SIZE, VOCAB_SIZE, CacheRunner
from llmstack_core_scheduler import Scheduler
from llmstack_engine_core import EngineConfig, SchedulerConfig
from llmstack_engine_core.build import make_stages
from llmstack_engine_core.disk_cache.open_store import make_stored_prefixes
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.events import EventBus
from llmstack_engine_core.observers import Observers
from llmstack_engine_core.structured_output import LazyBackend
from llmstack_step_log import LoggedScheduler, LogHeader, RecordedRun, RingSink, StepLog
from llmstack_step_log.control_plane import CacheConfig, build_cache
from llmstack_step_log.replay import verify
from llmstack_types import (
    EngineCoreRequest,
    EngineReady,
    KVCacheSpec,
    MediaSpec,
    ModelRunnerConfig,
    SamplingParams,
)
from llmstack_types.stats import DISK_MISS_CAUSES, DiskCacheStats

PROMPT = [(7 * place + 3) % VOCAB_SIZE for place in range(150)]
SPEC = KVCacheSpec(1, 1, "float32", 8 * BLOCK_SIZE, BLOCK_SIZE, "cpu", VOCAB_SIZE)


class Core:
    """An engine core over `CacheRunner` with a cache on disk, whose log is kept."""

    def __init__(self, folder: Path, *, contract: str = "c0", num_blocks: int = 256, max_bytes: int = 1 << 20,
                 media: MediaSpec | None = None) -> None:  # fmt: skip
        limits: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        if media is not None:
            limits["encoder_cache_tokens"] = 512
        model = ModelRunnerConfig("", **limits)
        config = EngineConfig(model, scheduler=SchedulerConfig(**limits, media=media), kv_cache_dir=str(folder),
                              kv_cache_disk_bytes=max_bytes)  # fmt: skip
        cache = CacheConfig(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
        self.sink = RingSink(1 << 22)
        log = StepLog(LogHeader.of(config.scheduler, cache, {}), self.sink)
        self.scheduler = LoggedScheduler(Scheduler(config.scheduler, build_cache(cache)), log)
        self.runner: Any = CacheRunner()
        ready = EngineReady(num_blocks, BLOCK_SIZE, 512, VOCAB_SIZE, "float32", "cpu", num_kv_tokens=num_blocks * 4,
                            numeric_contract_id=contract, media=media)  # fmt: skip
        events = EventBus((), lambda: 0.0)
        self.stored: Any = make_stored_prefixes(config, self.scheduler, self.runner, SPEC, ready)
        stages = make_stages(self.scheduler, self.runner, events, LazyBackend("", None, VOCAB_SIZE), stored=self.stored)
        self.core = EngineCore(self.scheduler, self.runner, ready, stages, Observers(events, step_log=log))
        self._num_requests = 0

    def request(self, prompt: list[int], **fields: Any) -> EngineCoreRequest:
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, seed=0)
        return EngineCoreRequest(f"ask-{self._num_requests}", prompt, params, **fields)

    def ask(self, prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[int], int, int]:
        """The tokens of a request, how many of its prompt's were found, and how many of those were read."""
        self.core.add_request(self.request(prompt, **fields))
        outputs = self.finish()
        tokens = [token_id for output in outputs for token_id in output.new_token_ids]
        return tokens, outputs[0].num_cached_tokens, outputs[0].num_disk_tokens

    def finish(self) -> list[Any]:
        outputs = []
        for _ in range(10_000):
            if not self.core.has_unfinished_requests():
                return outputs
            outputs += self.core.step().outputs
        raise AssertionError("the requests did not end")

    def write(self) -> None:
        """Has all files written that wait."""
        while self.stored.is_in_use:
            self.stored.work_when_idle()
        is_written = threading.Event()
        self.stored._writes.behind.after(is_written.set)
        assert is_written.wait(30.0)

    @property
    def disk(self) -> DiskCacheStats:
        disk = self.core.stats().disk
        assert disk is not None
        return disk

    def misses(self) -> dict[str, int]:
        return {cause: count for cause, count in zip(DISK_MISS_CAUSES, self.disk.num_misses, strict=True) if count}

    def close(self) -> None:
        """Ends the engine core, and verifies its log."""
        assert self.core.stats().num_free_blocks == self.core.stats().num_blocks
        self.core.shutdown()
        verify(RecordedRun(self.sink.dump()))
