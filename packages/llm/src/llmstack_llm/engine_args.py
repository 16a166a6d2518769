"""vLLM's engine arguments, and how they become the configurations of the layers below."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from llmstack_llm.model_config import ModelConfig, load_model_config
from llmstack_llm.model_use import RUNNERS, ModelUse
from llmstack_llm.structured_outputs import read_structured_outputs_config
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_core import EngineConfig

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLS = ("auto", "llmstack", "transformers")
QUANTIZATIONS = ("int8", "int4", "fp8")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
CONTENT_FORMATS = ("auto", "string", "openai")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


class EngineArgsError(LLMStackError, ValueError):
    """An option is out of range, or two contradict each other; the text names them."""


class UsageContext(StrEnum):
    """Who starts the engine; decides defaults."""

    OPENAI_API_SERVER = "server"
    LLM_CLASS = "llm"


# A server keeps steps short for the sake of the streams beside a prefill; offline work wants few large steps.
_DEFAULT_MAX_NUM_BATCHED_TOKENS = {UsageContext.OPENAI_API_SERVER: 2048, UsageContext.LLM_CLASS: 8192}


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Options of one engine, under vLLM's names and with its defaults where it has them.

    Attributes:
        model: A folder, or a repository id.
        tokenizer: The same, where it is not the model's own.
        model_impl: `llmstack` runs our models, `transformers` those of that package; `auto` ours where there is one.
        enforce_eager: Record no steps: every one goes from operation to operation, for debugging.
        quantization: `int8`, `int4` or `fp8` rounds the weights of linear layers on loading: less memory and time for
            a little accuracy. None keeps their precision.
        max_model_len: None is what the checkpoint was made for.
        max_num_batched_tokens: None is 2048 for a server, 8192 for `LLM`.
        num_kv_blocks: Blocks of the KV cache; `num_gpu_blocks_override` is vLLM's name for it.
        kv_cache_memory_bytes: The size of the KV cache in another unit.
        max_num_partial_prefills: Requests in the midst of their prompts at once; 0 is no limit.
        num_host_blocks: Blocks in the host's memory that preempted requests may be swapped to; 0 recomputes them.
        kv_cache_dtype: What keys and values are stored in: `fp8` halves the KV cache for a little accuracy; `auto` is
            what the model computes in.
        cudagraph_capture_sizes: Numbers of decoding rows for which steps are recorded on a GPU; None is the runner's
            own list.
        enable_deterministic_inference: Refuse to start unless logits are bit-equal however they are computed.
        swap_space: Their size in GiB instead.
        async_scheduling: Schedule a step before the last one's tokens are known; changes no output. None does so on a
            GPU, without `speculative_config`.
        speculative_config: Guesses at tokens, several of which one step then verifies; changes no output. A mapping, or
            the same as JSON: `{"method": "ngram", "num_speculative_tokens": 5}`, with `prompt_lookup_max` and
            `prompt_lookup_min` for the lengths of the n-grams. None guesses nothing.
        generation_config: `auto` applies the model's own sampling defaults, `vllm` keeps vLLM's, or a folder.
        override_generation_config: Sampling defaults in place of those, such as `{"temperature": 0.2}`.
        hf_overrides: Values in place of those in the model's `config.json`; objects are merged.
        tokenizer_revision: Of `tokenizer`, where that is a repository.
        max_logprobs: Most likely tokens that a request may ask for at each place; -1 is the whole vocabulary.
        stream_interval: Tokens between two outputs of a stream, where a request does not say.
        max_num_queued_tokens: Prompt tokens of requests without a first token at most; None is no limit.
        skip_tokenizer_init: Token ids in, token ids out.
        chat_template: A path, or the template itself; None is the model's.
        chat_template_content_format: Whether templates get a message's content as `string` or in `openai`'s parts;
            `auto` asks the template.
        runner: `generate` or `pooling` leaves the other away, `auto` offers all that the model can. Or the name of
            the model runner: in the entry point group `llmstack.model_runners`, or `module:Class`.
        task: vLLM's older name for the same; `classify` and `score` ask for a model with labels.
        convert: `none` keeps a model that generates from pooling as well; `classify` asks for labels.
        pooler_config: How vectors are pooled by default, in place of what the folder says: a mapping, or the same as
            JSON, with `pooling_type` (`CLS`, `MEAN`, `LAST`) and `normalize`.
        record_steps: File for the log of every step, which `llmstack replay` reads; None keeps the last in memory.
        max_engine_restarts: How often within a minute an engine core that dies is replaced by one in which its requests
            go on; 0 ends them. For `AsyncLLM` over processes it has started.
        data_parallel_size: Engine cores that share the requests, each with the whole model and a share of the machine.
        max_num_queued_reqs: Completions in flight at most; None is no limit of the front end's own.
        log_level: Of the engine core's process.
        kv_cache_metrics: Measure how long KV blocks keep what they hold.
        kv_cache_metrics_sample: Share of the blocks that is measured then, in (0, 1].
        trace: Print a line for each stage of each request to standard error.
        structured_outputs_config: A mapping, or the same as JSON: `backend` (`auto`, `guidance`),
            `disable_any_whitespace`.
        logits_processors: Custom logits processors: classes, or their names as `module:Class`.
        logprobs_mode: `raw_logprobs` are those of the model, `processed_logprobs` those a token was drawn by.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    model_impl: str = "auto"
    enforce_eager: bool = False
    quantization: str | None = None
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    num_host_blocks: int = 0
    swap_space: float = 0.0
    async_scheduling: bool | None = None
    speculative_config: Mapping[str, Any] | str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    hf_overrides: Mapping[str, Any] | None = None
    tokenizer_revision: str | None = None
    max_logprobs: int = 20
    stream_interval: int = 1
    max_num_queued_tokens: int | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    disable_log_stats: bool = False
    runner: str = "default"
    task: str = "auto"
    convert: str = "auto"
    pooler_config: Mapping[str, Any] | str | None = None
    data_parallel_size: int = 1
    max_engine_restarts: int = 0
    max_num_queued_reqs: int | None = None
    log_level: str = "INFO"
    record_steps: str | None = None
    structured_outputs_config: Mapping[str, Any] | str | None = None
    logits_processors: Sequence[str | type] | None = None
    logprobs_mode: str = "raw_logprobs"
    trace: bool = False
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    kv_cache_dtype: str = "auto"
    cudagraph_capture_sizes: Sequence[int] | None = None
    enable_deterministic_inference: bool = False

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("model_impl", self.model_impl, MODEL_IMPLS)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        for size in self.cudagraph_capture_sizes or ():
            _check_positive("cudagraph_capture_sizes", size)
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _check_choice("chat_template_content_format", self.chat_template_content_format, CONTENT_FORMATS)
        for name in (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks",
            "num_gpu_blocks_override", "kv_cache_memory_bytes", "max_num_queued_reqs", "max_num_queued_tokens",
            "stream_interval",
            "data_parallel_size",
        ):  # fmt: skip
            _check_positive(name, getattr(self, name))
        if self.max_engine_restarts < 0:
            raise EngineArgsError(f"max_engine_restarts {self.max_engine_restarts}: expected 0 or more")
        if self.max_logprobs < -1:
            raise EngineArgsError(f"max_logprobs {self.max_logprobs}: expected -1, or 0 and more")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise EngineArgsError(f"gpu_memory_utilization {self.gpu_memory_utilization}: must lie in (0, 1]")
        if not 0.0 < self.kv_cache_metrics_sample <= 1.0:
            raise EngineArgsError(f"kv_cache_metrics_sample {self.kv_cache_metrics_sample}: must lie in (0, 1]")
        try:
            read_structured_outputs_config(self.structured_outputs_config)
        except ValueError as error:
            raise EngineArgsError(str(error)) from error
        self._check_conflicts()
        self._use()

    def create_engine_config(
        self, usage_context: UsageContext = UsageContext.OPENAI_API_SERVER
    ) -> tuple[ModelConfig, EngineConfig]:
        """Reads the model's configuration and resolves every default.

        Raises:
            EngineArgsError: Options contradict each other.
            ModelConfigError: An option contradicts the model.
            ModelFilesError: The model is not there.
        """
        model_config = load_model_config(
            self.model,
            tokenizer=self.tokenizer,
            revision=self.revision,
            dtype=_DTYPE_ALIASES.get(self.dtype, self.dtype),
            max_model_len=self.max_model_len,
            generation_config=self.generation_config,
            override_generation_config=self.override_generation_config or {},
            hf_overrides=self.hf_overrides or {},
            max_logprobs=self.max_logprobs,
            tokenizer_revision=self.tokenizer_revision,
            skip_tokenizer_init=self.skip_tokenizer_init,
            use=self._use(),
            pooler_config=_json_object("pooler_config", self.pooler_config),
        )
        if self.stream_interval != 1:
            defaults = {**model_config.default_sampling, "stream_interval": self.stream_interval}
            model_config = dataclasses.replace(model_config, default_sampling=defaults)
        return model_config, self._engine_config(model_config, usage_context)

    def _engine_config(self, model_config: ModelConfig, usage_context: UsageContext) -> EngineConfig:
        from llmstack_engine_core import EngineConfig

        speculative = _speculative(self.speculative_config)
        limits = {
            "max_model_len": model_config.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self._max_num_batched_tokens(model_config.max_model_len, usage_context),
        }
        model = {
            "model_path": str(model_config.path), "dtype": model_config.dtype, "load_format": self.load_format,
            "model_impl": self.model_impl, "seed": self.seed, "block_size": self.block_size, "device": self.device,
            "gpu_memory_utilization": float(self.gpu_memory_utilization), "logprobs_mode": self.logprobs_mode,
            "quantization": self.quantization, "enforce_eager": self.enforce_eager,
            "kv_cache_dtype": self.kv_cache_dtype,
            "cuda_graph_sizes": sorted(set(self.cudagraph_capture_sizes or ())),
            "enable_deterministic_inference": self.enable_deterministic_inference,
            "hf_overrides": json.dumps(self.hf_overrides) if self.hf_overrides else "",
            "num_engines": self.data_parallel_size,
            "logits_processors": [_class_name(entry) for entry in self.logits_processors or ()],
            "max_num_drafts": speculative["num_speculative_tokens"] if speculative else 0, **limits,
        }  # fmt: skip
        scheduler = {
            "enable_chunked_prefill": self.enable_chunked_prefill, "policy": self.scheduling_policy,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "max_num_partial_prefills": self.max_num_partial_prefills, "speculative": speculative, **limits,
        }  # fmt: skip
        data: dict[str, Any] = {
            "model": model, "scheduler": scheduler,
            "runner": "default" if self.runner in RUNNERS else self.runner,
            "enable_prefix_caching": self.enable_prefix_caching, "num_blocks": self._num_blocks(),
            "kv_cache_bytes": self.kv_cache_memory_bytes, "log_stats": not self.disable_log_stats,
            "is_max_model_len_explicit": self.max_model_len is not None, "log_level": self.log_level,
            "num_host_blocks": self.num_host_blocks, "host_kv_bytes": int(self.swap_space * 2**30),
            "async_scheduling": self.async_scheduling, "trace": self.trace,
            "block_metrics_sample": float(self.kv_cache_metrics_sample) if self.kv_cache_metrics else 0.0,
            # Absolute: the engine core's process may stand in another folder.
            "tokenizer_path": None if model_config.tokenizer_path is None else str(model_config.tokenizer_path),
            "max_restarts": self.max_engine_restarts,
            "record_steps": None if self.record_steps is None else os.path.abspath(self.record_steps),
        }  # fmt: skip
        try:
            return EngineConfig.from_plain(data)
        except ValueError as error:
            raise EngineArgsError(str(error)) from error

    def _max_num_batched_tokens(self, max_model_len: int, usage_context: UsageContext) -> int:
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        default = _DEFAULT_MAX_NUM_BATCHED_TOKENS[usage_context]
        return default if self.enable_chunked_prefill else max(default, max_model_len)

    def _use(self) -> ModelUse:
        try:
            return ModelUse.from_options(self.runner, self.task, self.convert)
        except ValueError as error:
            raise EngineArgsError(str(error)) from error

    def _num_blocks(self) -> int | None:
        return self.num_kv_blocks if self.num_kv_blocks is not None else self.num_gpu_blocks_override

    def _check_conflicts(self) -> None:
        if None not in (self.num_kv_blocks, self.num_gpu_blocks_override):
            raise EngineArgsError("num_kv_blocks and num_gpu_blocks_override are the same option; give one of them")
        if self._num_blocks() is not None and self.kv_cache_memory_bytes is not None:
            raise EngineArgsError("num_kv_blocks and kv_cache_memory_bytes both set the size of the KV cache; give one")
        if not 0.0 <= self.swap_space < float("inf"):
            raise EngineArgsError(f"swap_space {self.swap_space}: expected a number of GiB from 0 up")
        if self.num_host_blocks and self.swap_space:
            raise EngineArgsError("num_host_blocks and swap_space both set the host's share of the KV cache; give one")
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise EngineArgsError("skip_tokenizer_init and tokenizer contradict each other; give one of them")

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Every option's name."""
        return tuple(field.name for field in dataclasses.fields(cls))


def _class_name(processor: str | type) -> str:
    """`module:Class`, which is all that another process can be told."""
    if isinstance(processor, str):
        return processor
    if "." in getattr(processor, "__qualname__", "."):
        raise EngineArgsError(f"logits_processors: {processor!r:.100} must be a class at the top level of its module")
    return f"{processor.__module__}:{processor.__qualname__}"


def _json_object(name: str, value: Mapping[str, Any] | str | None) -> Mapping[str, Any] | None:
    """A mapping that may have been written as JSON.

    Raises:
        EngineArgsError: It is none.
    """
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise EngineArgsError(f"{name}: it is no JSON: {error}") from error
    if parsed is not None and not isinstance(parsed, Mapping):
        raise EngineArgsError(f"{name}: it is no JSON object")
    return parsed


def _speculative(value: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """The checked fields of a `SpeculativeConfig`.

    Raises:
        EngineArgsError: They are none.
    """
    if value is None:
        return None
    from llmstack_engine_core import SpeculativeConfig
    from llmstack_engine_core.plain_data import from_plain, to_plain

    try:
        named = json.loads(value) if isinstance(value, str) else value
        return to_plain(from_plain(SpeculativeConfig, named))
    except json.JSONDecodeError as error:
        raise EngineArgsError(f"speculative_config: it is no JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise EngineArgsError(f"speculative_config: {error}") from error


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise EngineArgsError(f"{name} {str(value)[:64]!r}: expected one of {', '.join(choices)}")


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise EngineArgsError(f"{name} {str(value)[:64]}: expected an integer of at least 1")
