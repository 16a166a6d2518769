"""Arguments of an engine under vLLM's names, and the configurations made of them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, get_type_hints

from llmstack_llm.engine_options.adapters import AdapterOptions
from llmstack_llm.engine_options.execution import (
    ComputationOptions,
    EngineObservabilityOptions,
    KVCacheOptions,
    SamplingOptions,
)
from llmstack_llm.engine_options.media import MediaInputOptions
from llmstack_llm.engine_options.model import ModelName, ModelOptions, RepositoryOptions, UseOptions
from llmstack_llm.engine_options.processes import EngineProcessOptions
from llmstack_llm.engine_options.scheduling import SchedulingOptions
from llmstack_llm.engine_options.speculation import (
    NO_DRAFTS,
    default_speculation,
    draft_head_of,
    of_scheduler,
    runs_on_cpu,
)
from llmstack_llm.options.problem import OptionsError, Problem
from llmstack_types.options import option_group

if TYPE_CHECKING:
    from llmstack_engine_core import EngineConfig
    from llmstack_llm.media.options import MediaOptions
    from llmstack_llm.model.config import ModelConfig


class EngineArgsError(OptionsError):
    """Options are out of range or contradict each other; the text has a line for each problem."""


class UsageContext(StrEnum):
    """The kind of program that starts the engine; it decides defaults."""

    OPENAI_API_SERVER = "server"
    LLM_CLASS = "llm"


# A server keeps steps short for the sake of the streams beside a prefill; offline work wants few large steps.
_DEFAULT_MAX_NUM_BATCHED_TOKENS = {UsageContext.OPENAI_API_SERVER: 2048, UsageContext.LLM_CLASS: 8192}

# A CPU computes so many tokens of prompts at nearly its full rate: a step of more would only delay the first of them.
_CPU_MAX_PREFILL_TOKENS = 256
# A step with prompts takes at most so many times that of the running streams alone, as predicted; and three times that
# unless each step costs more than a sixth of the prompts in it.
_CPU_MAX_ITL_STEPS = 8.0


@option_group
class EngineArgs(
    ModelName,
    ModelOptions,
    RepositoryOptions,
    UseOptions,
    MediaInputOptions,
    SchedulingOptions,
    ComputationOptions,
    KVCacheOptions,
    SamplingOptions,
    AdapterOptions,
    EngineProcessOptions,
    EngineObservabilityOptions,
):
    """Options of one engine, under vLLM's names and with its defaults where it has them.

    `engine_options` declares them, and `docs/server-flags.md` lists them. JSON objects may be mappings or text.

    Raises:
        EngineArgsError: Options are out of range or contradict each other; the text has a line for each.
    """

    error = EngineArgsError

    def create_engine_config(
        self, usage_context: UsageContext = UsageContext.OPENAI_API_SERVER
    ) -> tuple[ModelConfig, EngineConfig]:
        """Reads the model's configuration and resolves every default.

        Raises:
            EngineArgsError: Options contradict each other.
            ModelConfigError: An option contradicts the model.
            ModelFilesError: The model is not there.
        """
        # Late: the `--help` of a server needs nothing but the declarations above.
        from llmstack_llm.model.config import load_model_config
        from llmstack_llm.model.use import ModelUse

        model_config = load_model_config(
            self.model,
            tokenizer=self.tokenizer,
            revision=self.revision,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            generation_config=self.generation_config,
            override_generation_config=self.override_generation_config or {},
            hf_overrides=self.hf_overrides or {},
            max_logprobs=self.max_logprobs,
            tokenizer_revision=self.tokenizer_revision,
            skip_tokenizer_init=self.skip_tokenizer_init,
            use=ModelUse.from_options(self.runner, self.task, self.convert),
            pooler_config=self.pooler_config,
            mmproj=self.mmproj,
            file_form=self.file_form,
        )
        if self.trust_remote_code:
            self._check_repository_code(model_config)
        self._check_sound(model_config)
        if self.stream_interval != 1:
            defaults = {**model_config.default_sampling, "stream_interval": self.stream_interval}
            model_config = dataclasses.replace(model_config, default_sampling=defaults)
        return model_config, self._engine_config(model_config, usage_context)

    def _check_repository_code(self, model_config: ModelConfig) -> None:
        from llmstack_llm.model.config import ModelConfigError
        from llmstack_llm.model.repository_code import repository_code_problem, warn_about_code

        if problem := repository_code_problem(model_config.hf_config):
            raise ModelConfigError(problem)
        warn_about_code(model_config.hf_config)

    def _check_sound(self, model_config: ModelConfig) -> None:
        from llmstack_llm.model.config import ModelConfigError
        from llmstack_model_files import SPEECH_ARCHITECTURE, WHOLE_CONFIG

        is_without = self.language_model_only or self.max_media_items.get("audio") == 0
        if is_without and model_config.architecture == SPEECH_ARCHITECTURE:
            flag = "--language-model-only" if self.language_model_only else '--limit-mm-per-prompt {"audio": 0}'
            raise ModelConfigError(f"{flag}: {SPEECH_ARCHITECTURE} answers to sound alone, so none is no model")
        if not is_without:
            self.check_sound_adapter(model_config.hf_config.get(WHOLE_CONFIG) or {}, model_config.path)

    def media_options(self, model_config: ModelConfig) -> MediaOptions:
        """The options of the front end for pictures of requests."""
        from llmstack_model_files import TEXT_PART_OF

        whole = "" if self.is_text_only else str(model_config.hf_config.get(TEXT_PART_OF) or "")
        return self.media_input_options(self.max_media_items, whole)

    def _engine_config(self, model_config: ModelConfig, usage_context: UsageContext) -> EngineConfig:
        from llmstack_engine_core import EngineConfig
        from llmstack_llm.model.draft_model import draft_model_fields

        parts, speculative = get_type_hints(EngineConfig), self._speculation()
        draft_head = draft_head_of(speculative)
        limits = {
            "max_model_len": model_config.max_model_len,
            "max_num_batched_tokens": self.step_tokens(model_config.max_model_len, usage_context),
        }  # fmt: skip
        model = self._named_as_in(parts["model"]) | limits | {
            "model_path": str(model_config.path), "dtype": model_config.dtype,
            "enable_hybrid_kv_cache": not self.disable_hybrid_kv_cache_manager,
            "cuda_graph_sizes": sorted(set(self.cudagraph_capture_sizes or ())),
            "hf_overrides": json.dumps(self.hf_overrides) if self.hf_overrides else "",
            "num_engines": max(1, self.num_local_engines), "digest_weight_content": self._compares_weights,
            "rank_timeout_s": self.distributed_timeout_seconds, "placement": self._placement(),
            "tokenizer_path": str(model_config.tokenizer_path or ""),
            "language_model_only": self.is_text_only,
            "logits_processors": [_class_name(entry) for entry in self.logits_processors or ()],
            **self._draft_limits(speculative), "draft_head": draft_head,
            **draft_model_fields(speculative, model_config, is_head=bool(draft_head)),
        }  # fmt: skip
        scheduler = self._named_as_in(parts["scheduler"]) | limits | {
            "policy": self.scheduling_policy, "max_prefill_tokens": self.prefill_tokens(usage_context),
            "speculative": None if speculative is None else of_scheduler(speculative),
            "max_loras": self.max_loras * self.enable_lora,
            "max_itl_ms": self.max_itl_ms or 0.0, "max_itl_steps": self.itl_steps(usage_context),
        }  # fmt: skip
        data = self._named_as_in(EngineConfig) | self._transfer_network() | {
            "model": model, "scheduler": scheduler, "runner": self.runner_name, "num_blocks": self._num_blocks(),
            "kv_cache_bytes": self.kv_cache_memory_bytes, "log_stats": not self.disable_log_stats,
            "is_max_model_len_explicit": self.max_model_len is not None, "profiler": self.profiler_config,
            "log_level": "DEBUG" if self.log_level == "trace" else self.log_level.upper(),
            "host_kv_bytes": int(self.swap_space * 2**30),
            "block_metrics_sample": self.kv_cache_metrics_sample if self.kv_cache_metrics else 0.0,
            # Absolute: the engine core's process may stand in another folder.
            "tokenizer_path": None if model_config.tokenizer_path is None else str(model_config.tokenizer_path),
            "max_cpu_loras": self.max_cpu_loras or self.max_loras, "max_restarts": self.max_engine_restarts,
            "hang_timeout_s": self.engine_hang_timeout, "key_file": self._key_file(), "hosts": self._hosts(),
            "kv_events": self.kv_events_config, "kv_transfer": self.kv_transfer_config,
            "kv_cache_dir": None if self.kv_cache_dir is None else os.path.abspath(self.kv_cache_dir),
            "record_steps": None if self.record_steps is None else os.path.abspath(self.record_steps),
        }  # fmt: skip
        try:
            return EngineConfig.from_plain(data)
        except ValueError as error:
            raise EngineArgsError(str(error)) from error

    def _named_as_in(self, config: type) -> dict[str, object]:
        """The options that a configuration has under the same name."""
        own = {option.name for option in dataclasses.fields(self)}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(config) if field.name in own}

    def _key_file(self) -> str | None:
        key_file = self.cluster_key_file if self.has_other_hosts else self.engine_key_file
        return None if key_file is None else os.path.abspath(key_file)

    def _hosts(self) -> dict[str, object] | None:
        """The other machines of the endpoint, if there are any.

        Raises:
            EngineStartError: The address of the first machine cannot be found, or the keys cannot be read.
        """
        if not self.has_other_hosts or self.data_parallel_address is None:
            return None
        from llmstack_engine_core.ipc.addresses import resolved, tcp_address

        self._check_keys()
        return {
            "address": tcp_address(resolved(self.data_parallel_address), self.data_parallel_rpc_port),
            "size": self.data_parallel_size, "num_local": self.num_local_engines,
            "start_rank": self.data_parallel_start_rank, "heartbeat_timeout_s": self.cluster_timeout,
            "allow_mixed_numerics": self.allow_mixed_numerics, "backend": self.data_parallel_backend,
            "weights_name": self.weights_name, "allow_ray_without_token": self.allow_ray_without_token,
        }  # fmt: skip

    def _check_keys(self) -> None:
        """Reads the keys before anything is started."""
        from pathlib import Path

        from llmstack_engine_core.ipc.keys import read_keys

        read_keys(Path(self.cluster_key_file or ""))

    def _placement(self) -> dict[str, object] | None:
        """The machines that share the ranks of one model, if there are several.

        Raises:
            EngineStartError: The address of the first one or the network interface cannot be found, or the keys
                cannot be read.
        """
        if self.num_nodes == 1:
            return None
        from llmstack_engine_core.ipc.addresses import interface_address, resolved, tcp_address

        self._check_keys()
        if self.trust_cluster_network is not None:
            interface_address(self.trust_cluster_network)
        address = "" if self.master_addr is None else tcp_address(resolved(self.master_addr), self.master_port)
        return {
            "launcher": self.launcher, "num_nodes": self.num_nodes, "node": self.node_rank,
            "address": address, "key_file": os.path.abspath(self.cluster_key_file or ""),
            "interface": self.trust_cluster_network or "", "silence_s": self.cluster_timeout,
            "allow_ray_without_token": self.allow_ray_without_token,
            "num_replicas": self.data_parallel_size if self.data_parallel_backend == "ray" else 1,
        }  # fmt: skip

    def conflicts(self) -> Iterator[Problem]:
        """Adds what stages of a model cannot do."""
        yield from super().conflicts()
        if self.warm_spare and self.record_steps is not None:
            yield Problem("{warm_spare} and {record_steps} exclude each other: two processes would write one file")
        if self.warm_spare and self.kv_events_config:
            yield Problem(
                "{warm_spare} and {kv_events_config} exclude each other: two processes would publish at one port"
            )
        if self.warm_spare and self.kv_cache_dir is not None:
            yield Problem("{warm_spare} and {kv_cache_dir} exclude each other: two processes would use one folder")
        if self.warm_spare and self.device == "cuda":
            yield Problem("{warm_spare} and {device} cuda exclude each other: the weights would be there twice")
        if self.kv_events_config and self._key_file() is None:
            yield from _exposed_events(self.kv_events_config)
        yield from self._transfer_conflicts()
        is_by_model = (self.speculative_config or {}).get("method") in ("draft_model", "mtp")
        if is_by_model and self.runner_name not in ("default", "parallel"):
            yield Problem("drafts by a model in {speculative_config} need a runner of llmstack, which makes them")
        yield from self._pace_conflicts()
        if self.pipeline_parallel_size == 1:
            return
        size = f"{{pipeline_parallel_size}} {self.pipeline_parallel_size}"
        if self.speculative_config not in (None, NO_DRAFTS):
            yield Problem(f"{{speculative_config}} and {size} exclude each other: drafts need one stage")
        if self.async_scheduling:
            yield Problem(f"{{async_scheduling}} and {size} exclude each other: a stage's input are known tokens")

    def _pace_conflicts(self) -> Iterator[Problem]:
        if self.max_itl_ms and not self.enable_chunked_prefill:
            yield Problem("{max_itl_ms} needs {enable_chunked_prefill}: it cuts prompts")
        if self.max_itl_ms and self.pipeline_parallel_size > 1:
            size = f"{{pipeline_parallel_size}} {self.pipeline_parallel_size}"
            yield Problem(f"{{max_itl_ms}} and {size} exclude each other: steps of several stages overlap")

    def _transfer_network(self) -> dict[str, object]:
        if not self._transfers_between_hosts:
            return {}
        network = {"interface": self.trust_cluster_network, "key_file": os.path.abspath(self.cluster_key_file or "")}
        return {"kv_transfer_network": network}

    @property
    def _transfers_between_hosts(self) -> bool:
        return (self.kv_transfer_config or {}).get("kv_connector") == "NixlConnector"

    def _transfer_conflicts(self) -> Iterator[Problem]:
        if not self._transfers_between_hosts:
            return
        option = "{kv_transfer_config} with NixlConnector"
        if self.trust_cluster_network is None:
            yield Problem(f"{option} needs {{trust_cluster_network}}: KV blocks between hosts are not encrypted")
        if self.cluster_key_file is None:
            yield Problem(f"{option} needs {{cluster_key_file}}: it says who may ask for KV blocks")

    @property
    def _compares_weights(self) -> bool:
        """Whether other servers, or later ones, have to know that the weights are equal, wherever the files lie."""
        is_shared = self.kv_transfer_config is not None or self.kv_cache_dir is not None
        return self.has_other_hosts or self.digests_weight_content or is_shared

    @property
    def runner_name(self) -> str:
        """The model runner that an engine core imports."""
        from llmstack_llm.model.use import RUNNERS

        if self.runner not in RUNNERS:
            return self.runner
        return "parallel" if self.num_ranks > 1 else "default"

    def _speculation(self) -> Mapping[str, object] | None:
        given = self.speculative_config
        if given is not None:
            # A GPU's steps have room for the drafts of many rows; on a CPU each token takes its time.
            return None if given == NO_DRAFTS else {"is_adaptive": runs_on_cpu(self.device), **given}
        is_local = self.runner_name in ("default", "parallel")  # other runners may verify no drafts
        if not is_local or self.pipeline_parallel_size > 1 or self.async_scheduling:
            return None
        return default_speculation(self.device)

    def _draft_limits(self, speculative: Mapping[str, Any] | None) -> Mapping[str, int]:
        if speculative is None:
            return {"max_num_drafts": 0, "max_num_logits": 0}
        max_num_logits = max(self.max_num_seqs, speculative["max_num_step_tokens"])  # longer steps have no drafts
        return {
            "max_num_drafts": speculative["num_speculative_tokens"],
            "max_num_logits": max_num_logits if speculative["is_adaptive"] else 0,
        }

    def step_tokens(self, max_model_len: int, usage_context: UsageContext = UsageContext.OPENAI_API_SERVER) -> int:
        """Most tokens of a step, for a model with such a longest request."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        default = _DEFAULT_MAX_NUM_BATCHED_TOKENS[usage_context]
        return default if self.enable_chunked_prefill else max(default, max_model_len)

    def prefill_tokens(self, usage_context: UsageContext = UsageContext.OPENAI_API_SERVER) -> int:
        """Most prompt tokens that requests have together in one step; 0 is no such limit."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        is_cpu_server = usage_context is UsageContext.OPENAI_API_SERVER and runs_on_cpu(self.device)
        return _CPU_MAX_PREFILL_TOKENS if is_cpu_server else 0

    def itl_steps(self, usage_context: UsageContext = UsageContext.OPENAI_API_SERVER) -> float:
        """Most time of a step with prompts, in steps of the running streams alone; 0 is no such limit."""
        is_cpu_server = usage_context is UsageContext.OPENAI_API_SERVER and runs_on_cpu(self.device)
        can_cut = self.enable_chunked_prefill and self.pipeline_parallel_size == 1
        return _CPU_MAX_ITL_STEPS if self.max_itl_ms is None and is_cpu_server and can_cut else 0.0

    def _num_blocks(self) -> int | None:
        return self.num_kv_blocks if self.num_kv_blocks is not None else self.num_gpu_blocks_override


def _exposed_events(kv_events: Mapping[str, object]) -> Iterator[Problem]:
    from llmstack_engine_core.kv_events import KVEventsConfig
    from llmstack_types.plain_data import from_plain

    config = from_plain(KVEventsConfig, dict(kv_events))
    if config.is_on and (exposed := config.exposed_endpoint()):
        yield Problem(
            "{kv_events_config}: other machines can reach {endpoint}, and events are prompt text; give "
            "{engine_key_file}, or an address of this machine alone",
            endpoint=exposed,
        )


def _class_name(processor: str | type) -> str:
    """`module:Class`, the form in which a class is passed to another process."""
    if isinstance(processor, str):
        return processor
    if "." in getattr(processor, "__qualname__", "."):
        raise EngineArgsError(f"logits_processors: {processor!r:.100} must be a class at the top level of its module")
    return f"{processor.__module__}:{processor.__qualname__}"
