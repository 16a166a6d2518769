"""Options of computation, memory, sampling and observability."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.engine_settings import (
    ComputationSettings,
    KVSettings,
    LogprobSettings,
    PrefixSettings,
    ReportSettings,
)
from llmstack_types.json_values import JSONValue
from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import (
    LogLevel,
)


def check_kv_events_config(value: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of a `KVEventsConfig`, defaults included."""
    from llmstack_engine_core.kv_events import KVEventsConfig  # late: `--help` needs none
    from llmstack_types.plain_data import from_plain, to_plain

    config = from_plain(KVEventsConfig, value)
    if config.data_parallel_rank:
        raise ValueError("data_parallel_rank is the number of the engine core, which cannot be set")
    checked: Mapping[str, object] = to_plain(config)
    return checked


def check_kv_transfer_config(value: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of a `KVTransferConfig`, defaults included."""
    from llmstack_engine_core.kv_transfer.config import KVTransferConfig  # late: `--help` needs none
    from llmstack_types.plain_data import from_plain, to_plain

    checked: Mapping[str, object] = to_plain(from_plain(KVTransferConfig, value))
    return checked


def read_sizes(text: str) -> tuple[int, ...]:
    """Integers separated by commas."""
    try:
        return tuple(int(part) for part in text.strip("[]").split(","))
    except ValueError:
        raise ValueError(f"{text[:64]!r} is not a list of integers such as 1,2,4") from None


# A class of vLLM to our own of the same arguments.
_SAME_PROCESSORS: Mapping[str, str] = {
    "vllm.model_executor.models.deepseek_ocr:NGramPerReqLogitsProcessor": (
        "llmstack_model_runner.sampling.window_ngrams:WindowNgrams"
    ),
}


def check_processors(processors: Sequence[str | type]) -> Sequence[str | type]:
    """Names of the form `module:Class`, or classes."""
    for processor in processors:
        if isinstance(processor, str) and not all(processor.partition(":")):
            raise ValueError(f"{processor[:200]!r} is not of the form module:Class")
    return tuple(_SAME_PROCESSORS.get(one, one) if isinstance(one, str) else one for one in processors)


@option_group
class ComputationOptions(ComputationSettings, OptionGroup):
    """How a step is computed."""

    title = "Computation"

    cudagraph_capture_sizes: Sequence[int] | None = option(
        None,
        also=("--cuda-graph-sizes",),
        at_least=1,
        read=read_sizes,
        metavar="N",
        help="batch sizes for which decode steps are captured on a GPU, such as 1 2 4 8 or 1,2,4,8 "
        "(default: chosen by the runner, up to --max-num-seqs)",
    )


@option_group
class KVCacheOptions(KVSettings, PrefixSettings, OptionGroup):
    """The size and form of the KV cache."""

    title = "KV cache"

    num_kv_blocks: int | None = option(
        None,
        also=("--num-gpu-blocks-override",),
        at_least=1,
        suffixes=True,
        help="blocks in the KV cache (default: as many as the free memory allows)",
    )
    num_gpu_blocks_override: int | None = option(None, at_least=1, flag="", help="the same as num_kv_blocks")
    kv_cache_memory_bytes: int | None = option(
        None,
        also=("--kv-cache-memory",),
        at_least=1,
        suffixes=True,
        metavar="BYTES",
        help="size of the KV cache, such as 512M",
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False, help="keep all KV blocks of layers with sliding windows; by default they keep only those that they need"
    )
    swap_space: float = option(
        0.0, at_least=0, metavar="GIB", help="size of the blocks of --num-host-blocks in GiB, in place of their number"
    )
    kv_transfer_config: Mapping[str, JSONValue] | None = option(
        None,
        check=check_kv_transfer_config,
        help="hand KV blocks of prompts to other servers, or take theirs",
        example='{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}',
    )

    def conflicts(self) -> Iterator[Problem]:
        """Adds sizes that are given twice."""
        yield from super().conflicts()
        if None not in (self.num_kv_blocks, self.num_gpu_blocks_override):
            yield Problem("{num_kv_blocks} and {num_gpu_blocks_override} are the same option; give one of them")
        for name in ("num_kv_blocks", "num_gpu_blocks_override"):
            if None not in (getattr(self, name), self.kv_cache_memory_bytes):
                yield Problem(f"{{{name}}} and {{kv_cache_memory_bytes}} both set the size of the KV cache; give one")
        if self.num_host_blocks and self.swap_space:
            yield Problem("{num_host_blocks} and {swap_space} both set the host's share of the KV cache; give one")
        if self.kv_transfer_config and not self.enable_prefix_caching:
            yield Problem("{kv_transfer_config} needs {enable_prefix_caching}: imported blocks are cached prefixes")
        if self.kv_cache_dir is not None and not self.enable_prefix_caching:
            yield Problem("{kv_cache_dir} needs {enable_prefix_caching}: it keeps cached prefixes")


@option_group
class SamplingOptions(LogprobSettings, OptionGroup):
    """How tokens are drawn, and what is said about them."""

    title = "Sampling"

    logits_processors: Sequence[str | type] | None = option(
        None,
        check=check_processors,
        metavar="MODULE:CLASS",
        help="custom logits processors, in the order in which they are applied",
    )
    max_logprobs: int = option(
        20,
        at_least=-1,
        help="maximum log-probabilities per token that a request may ask for; -1 for the whole vocabulary",
    )


@option_group
class EngineObservabilityOptions(ReportSettings, OptionGroup):
    """Reports of the engine about its steps."""

    title = "Observability"

    log_level: LogLevel = option(
        "info",
        ignores_case=True,
        environment=("LLMSTACK_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL"),
        help="log level of llmstack",
    )
    kv_events_config: Mapping[str, object] | None = option(
        None,
        check=check_kv_events_config,
        help="publish what the prefix cache stores and removes over ZeroMQ, with the token ids, which are prompt text",
        example='{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}',
    )
    kv_cache_metrics: bool = option(False, help="measure how long KV blocks stay in the cache")
    kv_cache_metrics_sample: float = option(
        0.01, above=0, at_most=1, metavar="X", help="share of the KV blocks that is measured"
    )
