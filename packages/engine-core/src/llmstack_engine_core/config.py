"""The configuration of one engine core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core.kv_events import KVEventsConfig
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferNetwork
from llmstack_types import ModelRunnerConfig
from llmstack_types.engine_settings import PrefixSettings, ProcessSettings, ReportSettings, StepLogSettings
from llmstack_types.options import check_ranges
from llmstack_types.plain_data import from_plain, to_plain
from llmstack_types.vocabulary import LoggingLevel, words_of

MIN_SNAPSHOT_STEPS = 64
_LOG_LEVELS = tuple(level.upper() for level in reversed(words_of(LoggingLevel)))

CONSTRAINT_BACKEND: Final = "llmstack_structured_output:ConstrainedRequests"


@dataclass(frozen=True, slots=True)
class HostsConfig:
    """Engine cores of one endpoint on several machines.

    Attributes:
        address: Where the first machine listens for the others, as `tcp://IP:port`.
        size: The engine cores of all machines.
        num_local: The engine cores of this machine.
        start_rank: The number of the first of them.
        heartbeat_timeout_s: A machine without a sign of life for so long counts as lost.
        allow_mixed_numerics: Engine cores may compute different bits; then no request moves between those.
        backend: `mp` waits for machines that others start, `ray` places all engine cores in a Ray cluster.
        allow_ray_without_token: The Ray cluster may be one that asks for no token.
        weights_name: What the engine cores serve, by the name in a list that each machine has.
    """

    address: str
    size: int
    num_local: int
    start_rank: int = 0
    heartbeat_timeout_s: float = 5.0
    allow_mixed_numerics: bool = False
    backend: str = "mp"
    allow_ray_without_token: bool = False
    weights_name: str = "start"


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """Places for profiles of the model runner, under vLLM's names.

    Attributes:
        torch_profiler_dir: Folder of the traces.
        profiler: `torch`, the only one.
        torch_profiler_with_stack: Record the Python stack of each operation, which takes time and space.
        torch_profiler_with_memory: Record what is allocated.
        torch_profiler_record_shapes: Record the shapes of arguments.
        torch_profiler_use_gzip: Compress traces.
        max_iterations: A profile ends by itself after so many steps.
    """

    torch_profiler_dir: str
    profiler: str = "torch"
    torch_profiler_with_stack: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_use_gzip: bool = True
    max_iterations: int = 100

    def __post_init__(self) -> None:
        if self.profiler != "torch":
            raise ValueError(f"profiler '{self.profiler[:64]}' is not supported; 'torch' is")
        if not self.torch_profiler_dir or "://" in self.torch_profiler_dir:
            raise ValueError("torch_profiler_dir must be a folder of this machine")
        if not 0 < self.max_iterations <= 1000:
            raise ValueError(f"max_iterations must be from 1 to 1000, but is {self.max_iterations}")


@dataclass(frozen=True, slots=True)
class EngineConfig(StepLogSettings, PrefixSettings, ProcessSettings, ReportSettings):
    """The configuration of one engine core; plain data, which can be sent to its process.

    Attributes:
        model: The configuration of the runner.
        runner: Name in the entry point group `llmstack.model_runners`, or `module:Class`.
        scheduler: Its limits are those of `model`.
        num_blocks: Blocks of the KV cache; None derives them from `kv_cache_bytes` or from the device.
        kv_cache_bytes: Size of the KV cache; None means what the device has left, within reason.
        host_kv_bytes: Their size in another unit, where `num_host_blocks` is 0.
        is_max_model_len_explicit: The user asked for this `max_model_len`: refuse to start rather than lower it when
            the KV cache cannot hold one such request.
        log_stats: Report the scheduler's state with each step, and the states of requests.
        num_recorded_steps: Last steps that `Control.RECENT_STEPS` returns; 0 keeps none.
        block_metrics_sample: Share of the KV blocks that is followed, to measure how long they keep what they hold.
        tokenizer_path: Folder of the tokenizer, for which constraints are compiled; None refuses constrained requests.
        kv_events: Where the events of the prefix cache are published; None for nowhere.
        kv_transfer: How KV blocks of requests are exchanged with other engine cores; None for not at all.
        kv_transfer_network: The network to them, if they are on other hosts.
        profiler: Where profiles are written; None records none.
        constraint_backend: The class that compiles and follows constraints, as `module:Class`.
        log_level: The log level of the engine core's process.
        max_num_queued_requests: Requests the engine core holds at most, running ones included; more are refused.
        start_timeout_s: How long a client waits for the engine core to become ready.
        shutdown_grace_s: How long a client waits for the process to end by itself before it kills it.
        max_restarts: How often within a minute a client for an event loop starts another process for one that died,
            and goes on with its requests; 0 ends them.
        key_file: Path of the keys that a TCP address needs; both ends read it.
        max_cpu_loras: Adapters that are kept in memory.
        hang_timeout_s: A process that makes no progress for so long, and for 20 times of what its step should take, is
            killed; 0 lets it hang.
        hosts: The other machines of the endpoint; None where this one is all.
    """

    model: ModelRunnerConfig
    runner: str = "default"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    is_max_model_len_explicit: bool = False
    log_stats: bool = True
    log_level: str = "INFO"
    max_num_queued_requests: int = 65_536
    start_timeout_s: float = 600.0
    shutdown_grace_s: float = 5.0
    max_restarts: int = 0
    hang_timeout_s: float = 60.0
    key_file: str | None = None
    hosts: HostsConfig | None = None
    host_kv_bytes: int = 0
    num_recorded_steps: int = 512
    max_cpu_loras: int = 1
    block_metrics_sample: float = 0.0
    tokenizer_path: str | None = None
    kv_events: KVEventsConfig | None = None
    kv_transfer: KVTransferConfig | None = None
    kv_transfer_network: TransferNetwork | None = None
    profiler: ProfilerConfig | None = None
    constraint_backend: str = CONSTRAINT_BACKEND

    def __post_init__(self) -> None:
        check_ranges(self)
        self._check_shared_limits()
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("num_blocks and kv_cache_bytes both set the size of the KV cache; give one of them")
        positive = ("num_blocks", "kv_cache_bytes", "max_num_queued_requests", "start_timeout_s", "shutdown_grace_s")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, but is {value}")
        if self.num_host_blocks and self.host_kv_bytes:
            raise ValueError("num_host_blocks and host_kv_bytes both set the host's share of the KV cache; give one")
        for name in ("host_kv_bytes", "num_recorded_steps", "max_restarts", "hang_timeout_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.async_scheduling and self.scheduler.max_num_drafts:
            raise ValueError("async_scheduling and speculative decoding exclude each other: drafts follow known tokens")
        if not 0.0 <= self.block_metrics_sample <= 1.0:
            raise ValueError(f"block_metrics_sample must lie in [0, 1], but is {self.block_metrics_sample}")
        self._check_log()
        self._check_transfer()
        if self.kv_cache_dir is not None and not self.enable_prefix_caching:
            raise ValueError("kv_cache_dir needs enable_prefix_caching: what it keeps are cached prefixes")

    def _check_log(self) -> None:
        if self.log_level not in _LOG_LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(_LOG_LEVELS)}, but is {self.log_level[:64]!r}")
        if 0 < self.snapshot_steps < MIN_SNAPSHOT_STEPS:  # each one copies the state between two steps
            raise ValueError(f"snapshot_steps must be 0 or at least {MIN_SNAPSHOT_STEPS}, but is {self.snapshot_steps}")

    def _check_transfer(self) -> None:
        if self.kv_transfer is None:
            return
        if self.kv_transfer.is_between_hosts and self.kv_transfer_network is None:
            raise ValueError("kv_transfer between hosts needs kv_transfer_network: an interface and a key file")
        if not self.enable_prefix_caching:
            raise ValueError("kv_transfer needs enable_prefix_caching: imported blocks are cached prefixes")

    def _check_shared_limits(self) -> None:
        shared = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "pipeline_parallel_size")
        for name in (*shared, "encoder_cache_tokens"):
            of_model, of_scheduler = getattr(self.model, name), getattr(self.scheduler, name)
            if of_model != of_scheduler:
                raise ValueError(f"model.{name} is {of_model}, but scheduler.{name} is {of_scheduler}")
        max_loras = self.model.max_loras if self.model.enable_lora else 0
        if max_loras != self.scheduler.max_loras or self.max_cpu_loras < max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras} and scheduler.max_loras is {self.scheduler.max_loras}, but "
                f"steps of the model have up to {max_loras} adapters"
            )
        if self.model.max_num_drafts != self.scheduler.max_num_drafts:
            raise ValueError(
                f"model.max_num_drafts is {self.model.max_num_drafts}, but the scheduler's is "
                f"{self.scheduler.max_num_drafts}"
            )

    def to_plain(self) -> dict[str, object]:
        """Nested dicts of builtins: for msgpack and JSON."""
        return to_plain(self)

    @classmethod
    def from_plain(cls, data: object) -> EngineConfig:
        """The inverse of `to_plain`.

        Raises:
            ValueError: An unknown or a missing field, or one of the wrong type; the text names it.
        """
        return from_plain(cls, data)
