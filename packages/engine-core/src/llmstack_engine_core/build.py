"""Construction of an engine core from its configuration."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from llmstack_core_scheduler import SchedulerConfig
from llmstack_core_scheduler.draft_costs import QUANTIZED
from llmstack_engine_core.adapter_gate import make_adapter_gate
from llmstack_engine_core.audits import DEFAULT_SHARE, TOLERANCE, Audits
from llmstack_engine_core.beams import BeamSearches
from llmstack_engine_core.build_observers import (
    make_block_residency,
    make_cache_news,
    make_event_bus,
    make_profiles,
    make_shadow,
    open_step_log,
)
from llmstack_engine_core.cache_size import choose_cache_size, choose_max_model_len
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.contract import numeric_contract_id
from llmstack_engine_core.disk_cache.open_store import make_stored_prefixes
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.events import EventBus, StepRecorder
from llmstack_engine_core.kv_transfer.connectors import make_transfer
from llmstack_engine_core.kv_transfer.request_transfers import NO_TRANSFERS, RequestTransfers, TransferParts
from llmstack_engine_core.observers import Observers, numerics_of
from llmstack_engine_core.plugins import load_model_runner
from llmstack_engine_core.protocols import ConstraintBackend, EventHook, ModelRunner, TextRunner
from llmstack_engine_core.stages import AuditStage, PrefixStage, Stages
from llmstack_engine_core.structured_output import GrammarGate, LazyBackend
from llmstack_engine_core.text_gate import TextGate
from llmstack_step_log import LoggedScheduler, LogHeader, make_marker
from llmstack_step_log.control_plane import CacheConfig, build_cache, build_scheduler, cache_config
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import EngineReady, EngineStartError, KVCacheSpec, MediaSpec

logger = logging.getLogger(__name__)

CPU_STAGE_TOKENS = 64
GPU_STAGE_TOKENS = 512

REPORTED_DISTRIBUTIONS = (
    "llmstack-engine-core", "llmstack-core-scheduler", "llmstack-kv-cache", "llmstack-model-runner", "llmstack-kernels",
    "llmstack-structured-output",
    "pyzmq", "msgpack", "torch",
)  # fmt: skip


class PhaseTimer:
    """Seconds of each named phase, in order."""

    def __init__(self, phases_s: Mapping[str, float] | None = None) -> None:
        """`phases_s`: Seconds of the phases that were measured before."""
        self.phases_s: dict[str, float] = dict(phases_s or {})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the `with` block as phase `name`."""
        start_s = time.monotonic()
        yield
        self.phases_s[name] = self.phases_s.get(name, 0.0) + time.monotonic() - start_s


def build_engine_core(
    config: EngineConfig, event_hooks: Sequence[EventHook] = (), phases_s: Mapping[str, float] | None = None
) -> EngineCore:
    """Loads the model and sizes its KV cache; takes as long as that does.

    `event_hooks`: Called with the events of the engine core, after the recorder.
    `phases_s`: Seconds of the phases before, by name; `EngineReady.phases_s` has them too.

    Raises:
        EngineStartError: It cannot start as configured; the text says why in one line.
        ValueError: The runner cannot run the model; the text says why in one line.
    """
    timer = PhaseTimer(phases_s)
    with timer.phase("import_runner"):
        runner_class = load_model_runner(config.runner)
    runner = runner_class(config.model)
    try:
        return _build_with_runner(config, runner, timer, event_hooks)
    except BaseException:
        runner.shutdown()  # also when a signal ends the start
        raise


def _build_with_runner(
    config: EngineConfig, runner: ModelRunner, timer: PhaseTimer, event_hooks: Sequence[EventHook]
) -> EngineCore:
    num_steps = config.num_recorded_steps
    recorder = StepRecorder(num_steps, begun_s=time.monotonic()) if num_steps else None
    with timer.phase("load_model"):
        runner.load_model()
    with timer.phase("size_kv_cache"):
        spec = runner.kv_cache_spec()
        is_size_given = config.num_blocks is not None or config.kv_cache_bytes is not None
        size = choose_cache_size(config, spec, runner.available_kv_bytes(is_size_given=is_size_given))
        num_host_blocks = config.num_host_blocks or config.host_kv_bytes // spec.bytes_per_block
        cache = cache_config(
            spec, size.num_blocks, config.enable_prefix_caching, num_host_blocks, size.num_state_blocks,
            config.session_eviction,
        )  # fmt: skip
        max_model_len = choose_max_model_len(config, cache)
    with timer.phase("initialize_kv_cache"):
        _initialize_kv_cache(runner, cache, spec)
    residency = make_block_residency(config, cache)
    profiles = make_profiles(config, runner)
    own = [hook for hook in (recorder, residency, profiles) if hook is not None]
    events = make_event_bus(config, own, event_hooks)
    with timer.phase("build_scheduler"):
        limits = replace(config.scheduler, max_model_len=max_model_len, max_num_seqs=size.num_rows)
        scheduler_config = choose_limits(limits, spec, runner.backends())
        kv_cache = build_cache(cache)
        scheduler = build_scheduler(scheduler_config, cache, events.on_status, kv_cache)
        ready = _make_ready(config, spec, cache, scheduler_config, timer.phases_s, runner.backends(), _versions())
        header = _make_header(config, scheduler_config, cache, ready)
        shadow = make_shadow(config, header)
        step_log = open_step_log(config, header, shadow)
    num_groups = len(spec.table_groups)
    logger.info(
        "KV cache: %d blocks of %d tokens%s, room for %.1f requests of %d; start took %s",
        cache.num_blocks, spec.block_size, f" in each of {num_groups} groups of layers" if num_groups else "",
        cache.num_usable_blocks / cache.num_blocks_needed(max_model_len, scheduler_config), max_model_len,
        _describe(timer.phases_s),
    )  # fmt: skip
    num_steps_under_way = max(2 if ready.async_scheduling else 1, scheduler_config.pipeline_parallel_size)
    cache_news = make_cache_news(config, kv_cache, scheduler.media_numbers) if cache.enable_prefix_caching else None
    logged = scheduler if step_log is None else LoggedScheduler(scheduler, step_log)
    stored = make_stored_prefixes(config, logged, runner, spec, ready)
    audits = make_audits(config, logged, ready, events.clock, stored)
    stages = make_stages(
        logged, runner, events,
        constraints=LazyBackend(config.constraint_backend, config.tokenizer_path, spec.vocab_size),
        max_cpu_loras=config.max_cpu_loras if config.model.enable_lora else 0,
        num_steps_under_way=num_steps_under_way, audits=audits,
        stored=stored,
        transfer=None
        if config.kv_transfer is None
        else make_transfer(config.kv_transfer, config.kv_transfer_network, runner, spec, ready),
    )  # fmt: skip
    return EngineCore(
        logged, runner, ready, stages,
        Observers(events, recorder, residency, profiles, step_log, shadow, cache_news, config.log_stats),
        max_num_queued_requests=config.max_num_queued_requests, num_steps_under_way=num_steps_under_way,
        ready_with=partial(_with_weights, config, ready, runner),
    )  # fmt: skip


def _with_weights(config: EngineConfig, ready: EngineReady, runner: ModelRunner, path: str) -> EngineReady:
    """The message about an engine core whose runner has the weights of a folder now."""
    backends, model = dict(runner.backends()), config.model.with_weights(path)
    contract_id = numeric_contract_id(model, ready.dtype, ready.kv_cache_dtype, ready.vocab_size, backends)
    return replace(ready, backends=backends, numeric_contract_id=contract_id)


def _make_header(config: EngineConfig, scheduler: SchedulerConfig, cache: CacheConfig, ready: EngineReady) -> LogHeader:
    marker = make_marker() if config.snapshot_steps else b""
    return LogHeader.of(scheduler, cache, ready.versions, marker, numerics_of(ready))


def make_audits(
    config: EngineConfig, scheduler: Scheduler, ready: EngineReady, clock: Callable[[], float], stored: PrefixStage
) -> AuditStage:
    """The audits of the prefix cache; `stored` forgets what they find wrong.

    Raises:
        EngineStartError: They are asked for, and there is no hit to audit.
    """
    has_equal_bits = ready.backends.get("numeric_contract", "").startswith("holds")
    share = config.audit_hits
    can_audit = config.enable_prefix_caching and ready.is_causal and ready.is_generative
    if share and not can_audit:
        raise EngineStartError("--audit-hits needs prefix caching, and a model that generates text")
    if share is None:
        share = DEFAULT_SHARE if has_equal_bits and can_audit else 0.0
    if not share:
        return AuditStage()
    return Audits(
        share, 0.0 if has_equal_bits else TOLERANCE, scheduler, ready, clock,
        max_num_tokens=config.scheduler.max_num_batched_tokens, distrust=stored.distrust,
    )  # fmt: skip


def make_stages(
    scheduler: Scheduler,
    runner: ModelRunner,
    events: EventBus,
    constraints: Callable[[], ConstraintBackend],
    *,
    max_cpu_loras: int = 0,
    num_steps_under_way: int = 1,
    transfer: TransferParts | None = None,
    audits: AuditStage | None = None,
    stored: PrefixStage | None = None,
) -> Stages:
    """The stages before `scheduler`.

    `constraints` makes the backend of constrained requests. `max_cpu_loras` adapters are kept in memory; 0 refuses
    requests that name one. `transfer` is what carries KV blocks of requests; None refuses those that ask for it.
    Without `audits` there are none, and without `stored` no prefixes on disk.
    """
    return Stages(
        adapters=make_adapter_gate(runner, max_cpu_loras, num_steps_under_way, events.on_status),
        grammars=GrammarGate(constraints, events.on_status),
        transfers=NO_TRANSFERS if transfer is None else RequestTransfers(transfer, scheduler),
        beams=BeamSearches(scheduler),
        audits=audits or AuditStage(),
        stored=stored,
        texts=TextGate(cast("TextRunner", runner)) if hasattr(runner, "read_token_texts") else None,
    )


def _make_ready(
    config: EngineConfig,
    spec: KVCacheSpec,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    phases_s: Mapping[str, float],
    backends: Mapping[str, str],
    versions: Mapping[str, str],
) -> EngineReady:
    kv_cache_dtype, max_model_len = spec.kv_cache_dtype or spec.dtype, scheduler.max_model_len
    return EngineReady(
        num_blocks=cache.num_usable_blocks,
        block_size=spec.block_size,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        dtype=spec.dtype,
        device=spec.device,
        kv_cache_bytes=spec.num_cache_bytes(cache.num_blocks, cache.num_state_blocks),
        pid=os.getpid(),
        phases_s=phases_s,
        backends=dict(backends),
        embedding_size=spec.embedding_size,
        is_generative=spec.is_generative,
        is_causal=spec.is_causal,
        num_labels=spec.num_labels,
        model_path=config.model.model_path,
        weights_name=config.weights_name,
        media=spec.media,
        encoder_cache_tokens=scheduler.num_encoder_tokens,
        kv_cache_dtype=kv_cache_dtype,
        async_scheduling=resolve_async_scheduling(config, spec.device),
        versions=versions,
        num_kv_tokens=max(max_model_len, cache.num_usable_blocks * spec.block_size // len(cache.table_groups)),
        numeric_contract_id=numeric_contract_id(config.model, spec.dtype, kv_cache_dtype, spec.vocab_size, backends),
        max_num_rows=scheduler.max_num_rows,
        num_state_blocks=cache.num_state_blocks,
    )


def resolve_async_scheduling(config: EngineConfig, device: str) -> bool:
    """The option if it is given; else on for GPUs, unless drafts have to follow known tokens."""
    if config.async_scheduling is not None:
        return config.async_scheduling
    if config.scheduler.pipeline_parallel_size > 1:
        return False  # several steps are under way, each of requests whose tokens are known
    return device == "cuda" and not config.scheduler.max_num_drafts


def choose_limits(config: SchedulerConfig, spec: KVCacheSpec, backends: Mapping[str, str]) -> SchedulerConfig:
    """The configuration for the model.

    Raises:
        EngineStartError: Steps are too small for what the model takes.
    """
    config = choose_stage_tokens(choose_drafts(config, backends, spec.draft_cost, spec.weight_bytes), spec.device)
    config = with_media(config, spec.media)
    if spec.state_group is not None and spec.media is not None and spec.media.is_atomic:
        raise EngineStartError("the model has layers with a state, and items that are computed in one step")
    if spec.state_group is not None and config.shorter_prompts_first:
        raise EngineStartError("--shorter-prompts-first is for models without layers with a state")
    return config if spec.is_causal else with_whole_prompts(config)


def choose_drafts(
    config: SchedulerConfig, backends: Mapping[str, str], draft_cost: float = 0.0, step_bytes: int = 0
) -> SchedulerConfig:
    """Without drafts where they must change no bit, and the runner does not say that they change none.

    `draft_cost` is that of the model that makes the drafts, if one does. A step reads `step_bytes` of weights.
    """
    speculative = config.speculative
    if speculative is not None and speculative.is_by_model:
        logger.info("draft tokens: up to %d by the method %s, each of which takes %.3f of a step",
                    speculative.num_speculative_tokens, speculative.method, draft_cost)  # fmt: skip
        speculative = replace(speculative, draft_cost=round(draft_cost, 6))
        config = replace(config, speculative=speculative)
    if speculative is not None and not speculative.is_by_model and speculative.is_adaptive:
        given = speculative.step_bytes or step_bytes
        speculative = replace(speculative, variant=_native_variant(backends), step_bytes=given)
        config = replace(config, speculative=speculative)
    if speculative is None or not speculative.needs_equal_bits:
        return config
    has_drafts = backends.get("numeric_contract", "").startswith("holds")
    logger.info("draft tokens: %s", "n-grams, where they are expected to repay their cost" if has_drafts else "none")
    return config if has_drafts else replace(config, speculative=None)


def _native_variant(backends: Mapping[str, str]) -> str:
    """The variant of the native kernels that compute linear layers, as in `native (avx2)`; empty without them.

    `QUANTIZED` is behind it where they compute from weights of few bits.
    """
    name, _, note = backends.get("linear", "").partition(" (")
    quantization = backends.get("quantization", "")
    ending = QUANTIZED if quantization and "widened" not in quantization else ""
    return note.partition(")")[0] + ending if name == "native" else ""


def choose_stage_tokens(config: SchedulerConfig, device: str) -> SchedulerConfig:
    """The smallest part of a prompt that a stage computes about as fast per token as a large one."""
    if config.pipeline_parallel_size == 1 or config.min_stage_tokens:
        return config
    return replace(config, min_stage_tokens=CPU_STAGE_TOKENS if device == "cpu" else GPU_STAGE_TOKENS)


def with_media(config: SchedulerConfig, media: MediaSpec | None) -> SchedulerConfig:
    """The configuration for what the model takes besides tokens.

    Raises:
        EngineStartError: Its items do not fit into the steps; the text has the number to set.
    """
    num_tokens = 0 if media is None or not media.is_atomic else max(media.max_num_tokens.values(), default=0)
    try:
        return replace(config, media=media, min_stage_tokens=max(config.min_stage_tokens, num_tokens))
    except ValueError as error:
        raise EngineStartError(f"the model takes media: {error}") from error


def with_whole_prompts(config: SchedulerConfig) -> SchedulerConfig:
    """The configuration for bidirectional models, where each prompt is computed in one step."""
    if config.max_num_batched_tokens < config.max_model_len:
        logger.warning("max_num_batched_tokens raised from %d to %d: this model computes each prompt in one step",
                       config.max_num_batched_tokens, config.max_model_len)  # fmt: skip
    return replace(
        config,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_model_len),
        long_prefill_token_threshold=0,
        max_prefill_tokens=0,
        max_itl_ms=0.0,
        max_itl_steps=0.0,
        shorter_prompts_first=False,
    )


def _initialize_kv_cache(runner: ModelRunner, cache: CacheConfig, spec: KVCacheSpec) -> None:
    num_blocks = cache.num_blocks
    try:
        if cache.num_state_blocks:
            runner.initialize_kv_cache(num_blocks, cache.num_host_blocks, cache.num_state_blocks)
        elif cache.num_host_blocks:
            runner.initialize_kv_cache(num_blocks, cache.num_host_blocks)
        else:  # a runner without host storage need not know of it
            runner.initialize_kv_cache(num_blocks)
    except MemoryError as error:
        raise EngineStartError(
            f"out of memory: the KV cache of {num_blocks * spec.bytes_per_block} bytes could not be allocated; "
            "lower --kv-cache-memory-bytes"
        ) from error


def _describe(phases_s: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases_s.items())


def _versions() -> dict[str, str]:
    """Versions of what is at work here; a module that is not loaded is not asked for."""
    found = {"python": platform.python_version()}
    for name in REPORTED_DISTRIBUTIONS:
        if name == "torch" and name not in sys.modules:
            continue
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # sources on PYTHONPATH
            continue
    return found
