"""The configuration of one server: flags and environment, typed, in one place."""

from __future__ import annotations

import argparse
import ipaddress
import logging
from dataclasses import dataclass, field
from typing import Any

from llmstack_server.chat.options import ChatOptions, chat_options
from llmstack_server.devices import describe_devices
from llmstack_server.environment import Environment
from llmstack_server.errors import ServeError
from llmstack_server.flag_types import port as parse_port
from llmstack_server.flags import LOG_LEVELS
from llmstack_server.http_options import (
    AnswerConfig,
    CORSConfig,
    RateLimits,
    RequestLogConfig,
    ResponseStoreConfig,
    TLSConfig,
    answer_config,
    cors_config,
    given_api_keys,
    rate_limits,
    request_log_config,
    response_store_config,
    root_path,
    tls_config,
)
from llmstack_server.observability import ObservabilityConfig, observability_config
from llmstack_server.process_options import ProcessConfig, process_config
from llmstack_server.secret import Secret

logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEMO_MODEL_NAME = "llmstack-demo"
DEFAULT_MAX_NUM_QUEUED_REQS = 1024

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_ENGINE_FIELDS = (
    "tokenizer", "tokenizer_revision", "skip_tokenizer_init", "revision", "hf_overrides",
    "load_format", "model_impl", "quantization", "enforce_eager", "kv_cache_dtype", "cudagraph_capture_sizes",
    "enable_deterministic_inference",
    "chat_template", "chat_template_content_format", "generation_config", "override_generation_config", "seed",
    "max_num_seqs",
    "max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_memory_bytes", "gpu_memory_utilization",
    "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy", "long_prefill_token_threshold",
    "max_num_partial_prefills", "num_host_blocks", "swap_space", "async_scheduling", "speculative_config",
    "structured_outputs_config", "runner", "task", "convert", "pooler_config", "logits_processors", "logprobs_mode",
    "max_logprobs", "stream_interval", "max_num_queued_tokens",
    "disable_log_stats", "record_steps", "kv_cache_metrics", "kv_cache_metrics_sample", "data_parallel_size",
    "max_engine_restarts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HTTPConfig:
    """How the server listens, whom it lets in, and how it ends.

    Attributes:
        api_keys: Empty lets everybody in.
        shutdown_timeout_s: How long running requests may go on after SIGTERM; 0 ends them at once.
        max_body_bytes: Larger bodies are refused unread.
        receive_timeout_s: How long a request may take to arrive.
        request_timeout_s: How long a request may take from where the engine gets it; None is no limit.
        uds: Path of a unix socket, which takes the place of host and port.
        uds_mode: Its permission bits.
        root_path: Prefix under which a proxy shows the server; empty for none.
        middleware: `module:name` of ASGI middleware, the last one outermost.
        extra_routes: `module:name` of functions that add routes to a router.
        has_open_metrics: `/metrics` needs no key.
        log_config_file: Takes the place of our own set-up of logging.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: tuple[Secret, ...] = ()
    shutdown_timeout_s: float = 30.0
    is_strict_params: bool = False
    enable_control_routes: bool = False
    has_metrics_aliases: bool = True
    max_body_bytes: int = 4 << 20
    receive_timeout_s: float = 60.0
    log_level: str = "info"
    uvicorn_log_level: str = "info"
    has_access_log: bool = True
    uds: str | None = None
    uds_mode: int = 0o600
    tls: TLSConfig | None = None
    cors: CORSConfig = field(default_factory=CORSConfig)
    root_path: str = ""
    middleware: tuple[str, ...] = ()
    extra_routes: tuple[str, ...] = ()
    has_open_metrics: bool = False
    max_header_bytes: int = 64 << 10
    max_num_headers: int = 128
    has_docs: bool = True
    has_tokenizer_info: bool = False
    request_log: RequestLogConfig = field(default_factory=RequestLogConfig)
    request_timeout_s: float | None = None
    rate_limits: RateLimits = field(default_factory=RateLimits)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    response_store: ResponseStoreConfig = field(default_factory=ResponseStoreConfig)
    log_config_file: str | None = None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `llmstack serve` was told.

    Attributes:
        model: Folder or repository id; None is the embedded demo model.
        served_model_names: The names in the API; the first is reported.
        engine: The fields of the engine's arguments, by their names there.
        max_model_len: None is the model's own.
        warnings: Lines for the log once it is set up.
        processes: How the server is spread over processes.
        flags: The command line as it was parsed, from which another process makes this configuration again.
    """

    model: str | None
    served_model_names: tuple[str, ...]
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_queued_reqs: int = DEFAULT_MAX_NUM_QUEUED_REQS
    engine: dict[str, Any] = field(default_factory=dict)
    http: HTTPConfig = HTTPConfig()
    chat: ChatOptions = field(default_factory=ChatOptions)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    warnings: tuple[str, ...] = ()
    processes: ProcessConfig = field(default_factory=ProcessConfig)
    flags: dict[str, Any] = field(default_factory=dict, repr=False)  # keys are among them


def config_from(namespace: argparse.Namespace, environment: Environment) -> ServeConfig:
    """The configuration of a parsed command line; flags win over the environment.

    Raises:
        ServeError: A combination that cannot work; the text names the flags.
    """
    _check_parallel(namespace)
    model = namespace.model_tag if namespace.model_tag is not None else namespace.model
    names = tuple(namespace.served_model_name or ()) or (model or DEMO_MODEL_NAME,)
    keys = given_api_keys(namespace)
    http = _http_config(namespace, environment, keys)
    max_model_len = namespace.max_model_len
    if max_model_len == 0:
        raise ServeError("--max-model-len: 0 is below the minimum of 1", exit_code=2)
    return ServeConfig(
        model=model,
        served_model_names=names,
        dtype=_DTYPE_ALIASES.get(namespace.dtype, namespace.dtype),
        max_model_len=None if max_model_len == -1 else max_model_len,
        max_num_queued_reqs=namespace.max_num_queued_reqs
        or max(DEFAULT_MAX_NUM_QUEUED_REQS, 4 * namespace.max_num_seqs),
        engine={name: getattr(namespace, name) for name in _ENGINE_FIELDS},
        http=http,
        chat=chat_options(namespace),
        observability=observability_config(namespace, environment),
        warnings=tuple(_warnings(namespace, environment, http)),
        processes=process_config(namespace),
        # A file of keys may be a pipe, which cannot be read again.
        flags={**vars(namespace), "api_key": keys or None, "api_key_file": None},
    )


def _check_parallel(namespace: argparse.Namespace) -> None:
    for flag in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(namespace, flag)
        if size != 1:
            name = "--" + flag.replace("_", "-")
            raise ServeError(
                f"{name} {size}: an engine core runs on one device, and the machine has {describe_devices()}; "
                "--data-parallel-size N runs several engine cores on processors side by side",
                exit_code=2,
            )


def _http_config(namespace: argparse.Namespace, environment: Environment, given_keys: list[str]) -> HTTPConfig:
    keys = given_keys or ([environment.api_key] if environment.api_key else [])
    if namespace.require_auth and not keys:
        raise ServeError("--require-auth needs --api-key, --api-key-file or LLMSTACK_API_KEY", exit_code=2)
    return HTTPConfig(
        host=namespace.host or environment.host or DEFAULT_HOST,
        port=namespace.port if namespace.port is not None else _environment_port(environment),
        api_keys=tuple(Secret(key) for key in keys),
        shutdown_timeout_s=namespace.shutdown_timeout,
        is_strict_params=namespace.strict_params,
        enable_control_routes=namespace.enable_control_routes or namespace.uds is not None,
        has_metrics_aliases=not namespace.no_metrics_aliases,
        log_level=namespace.log_level or _environment_log_level(environment),
        uvicorn_log_level=namespace.uvicorn_log_level,
        has_access_log=not namespace.disable_uvicorn_access_log,
        uds=namespace.uds,
        uds_mode=namespace.uds_mode,
        tls=tls_config(namespace),
        cors=cors_config(namespace),
        root_path=root_path(namespace.root_path),
        middleware=tuple(namespace.middleware),
        extra_routes=tuple(namespace.extra_routes),
        has_open_metrics=namespace.open_metrics,
        max_header_bytes=namespace.h11_max_incomplete_event_size,
        max_num_headers=namespace.h11_max_header_count,
        has_docs=not namespace.disable_fastapi_docs,
        has_tokenizer_info=namespace.enable_tokenizer_info_endpoint,
        request_log=request_log_config(namespace),
        request_timeout_s=namespace.request_timeout or None,
        rate_limits=rate_limits(namespace),
        answers=answer_config(namespace),
        response_store=response_store_config(namespace),
        log_config_file=namespace.log_config_file,
    )


def _environment_port(environment: Environment) -> int:
    if environment.port is None:
        return DEFAULT_PORT
    try:
        return parse_port(environment.port)
    except argparse.ArgumentTypeError as error:
        raise ServeError(f"LLMSTACK_PORT or VLLM_PORT: {error}", exit_code=2) from None


def _environment_log_level(environment: Environment) -> str:
    level = (environment.log_level or "info").lower()
    if level not in LOG_LEVELS:
        raise ServeError(f"LLMSTACK_LOGGING_LEVEL: '{level[:32]}' is none of {', '.join(LOG_LEVELS)}", exit_code=2)
    return level


def _warnings(namespace: argparse.Namespace, environment: Environment, http: HTTPConfig) -> list[str]:
    found = []
    if namespace.model_tag is not None and namespace.model not in (None, namespace.model_tag):
        found.append(f"serving {namespace.model_tag}: --model {namespace.model} is ignored")
    if namespace.api_key:
        found.append("--api-key shows in the list of processes; LLMSTACK_API_KEY and --api-key-file do not")
    if namespace.hf_token:
        found.append("--hf-token shows in the list of processes; HF_TOKEN does not")
    if http.uds is not None and (namespace.host is not None or namespace.port is not None):
        found.append(f"listening on the unix socket {http.uds} alone: --host and --port are ignored")
    if not http.api_keys and http.uds is None and not is_loopback(http.host):
        found.append(
            f"ANYBODY who can reach {http.host} may use this server: set LLMSTACK_API_KEY, or listen on 127.0.0.1 only"
        )
    if namespace.enable_sleep_mode and not http.enable_control_routes:
        found.append("--enable-sleep-mode opens no routes without --enable-control-routes or --uds")
    if namespace.engine_address and not namespace.headless:
        found.append("attached to running engine cores: options of the engine change nothing there")
    if environment.ignored:
        found.append(f"not understood and ignored: {', '.join(environment.ignored)}")
    return found


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
