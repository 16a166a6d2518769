"""The answer of `/server_info`: configuration, state, processes and versions."""

from __future__ import annotations

import os
import platform

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.option import options_of
from llmstack_server import server_version
from llmstack_server.state.server_state import ServerState
from llmstack_types import EngineReady


def server_info(state: ServerState) -> dict[str, object]:
    """Configuration, state and versions; API keys are counted, never shown."""
    config, http = state.config, state.config.http
    ready_engines = [] if state.opened_engine is None else state.opened_engine.engines
    engines = [] if state.ready is None else [_engine_info(ready) for ready in ready_engines]
    return {
        "version": server_version(),
        "state": str(state.lifecycle.reported_state),
        "python": platform.python_version(),
        "model": config.model or "(embedded demo model)",
        "served_model_names": list(config.served_model_names),
        "sampling_defaults": dict(state.sampling_defaults()),
        "config": _engine_options(config.engine),
        "flags_without_effect": [
            {"flag": flag.flag, "value": flag.value, "source": flag.source, "reason": flag.reason}
            for flag in config.settings.accepted
        ],
        "http": {
            "host": http.host, "port": http.port, "num_api_keys": len(http.api_keys),
            "shutdown_timeout_s": http.shutdown_timeout_s, "max_body_bytes": http.max_body_bytes,
            "strict_params": http.is_strict_params, "metrics_aliases": http.has_metrics_aliases,
            "uds": http.uds, "tls": http.tls is not None, "root_path": http.root_path,
            "allowed_origins": list(http.cors.origins), "middleware": list(http.middleware),
            "extra_routes": list(http.extra_routes), "control_routes": http.enable_control_routes,
            "logs_requests": http.request_log.logs_requests,
            "max_requests_per_minute_per_key": http.rate_limits.max_requests_per_minute,
            "max_concurrent_requests_per_key": http.rate_limits.max_concurrent_requests,
        },
        "processes": _process_info(state),
        "engine": engines[0] if engines else None,
        "engines": engines,
        **state.facts,
    }  # fmt: skip


def _engine_options(engine: EngineArgs) -> dict[str, object]:
    """The options of the engine, but for the model, which has a place of its own."""
    return {declared.name: getattr(engine, declared.name) for declared in options_of(EngineArgs)[1:]}


def _process_info(state: ServerState) -> dict[str, object]:
    """The index of this API process, and how the engine cores run."""
    config, peers = state.config.processes, state.peers
    return {
        "pid": os.getpid(),
        "api_server_index": 0 if peers is None else peers.index,
        "num_api_servers": config.num_api_servers,
        "num_engines": 0 if state.opened_engine is None else len(state.opened_engine.engines),
        "engines_in_processes": config.is_multiprocess,
        "attached_to": list(config.engine_addresses),
        "num_engine_restarts": 0 if state.opened_engine is None else state.opened_engine.num_restarts,
        "sleep_level": 0 if state.opened_engine is None else state.opened_engine.sleep_level,
    }


def _engine_info(ready: EngineReady) -> dict[str, object]:
    return {
        "dtype": ready.dtype, "device": ready.device, "max_model_len": ready.max_model_len, "pid": ready.pid,
        "num_blocks": ready.num_blocks, "block_size": ready.block_size, "kv_cache_bytes": ready.kv_cache_bytes,
        "max_num_rows": ready.max_num_rows, "num_state_blocks": ready.num_state_blocks,
        "vocab_size": ready.vocab_size, "backends": dict(ready.backends), "versions": dict(ready.versions),
        "startup_s": dict(ready.phases_s), "embedding_size": ready.embedding_size,
        "is_generative": ready.is_generative,
        "num_labels": ready.num_labels, "kv_cache_dtype": ready.kv_cache_dtype or ready.dtype,
        "async_scheduling": ready.async_scheduling,
    }  # fmt: skip
