"""Options of the scheduler, its queue, drafts and records of steps."""

from __future__ import annotations

import os
from collections.abc import Mapping

from llmstack_llm.engine_options.speculation import SPECULATION_FLAGS, check_speculative_config
from llmstack_llm.options.option import OptionGroup
from llmstack_types.engine_settings import SchedulerSettings, StepLogSettings, StepSettings
from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import SchedulingPolicyName


def check_profiler_config(value: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of a `ProfilerConfig`, with an absolute folder: the engine core's process may stand in another one."""
    from llmstack_engine_core.config import ProfilerConfig  # late: `--help` needs none
    from llmstack_types.plain_data import from_plain, to_plain

    config = from_plain(ProfilerConfig, value)
    return to_plain(config) | {"torch_profiler_dir": os.path.abspath(config.torch_profiler_dir)}


def check_structured_outputs_config(value: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of a `StructuredOutputsConfig`."""
    from llmstack_llm.admission.structured_outputs import read_structured_outputs_config  # late: `--help` needs none

    read_structured_outputs_config(value)
    return value


@option_group
class SchedulingOptions(StepSettings, SchedulerSettings, StepLogSettings, OptionGroup):
    """Which requests run in a step, and how many wait."""

    title = "Scheduling"

    max_num_batched_tokens: int | None = option(
        None,
        at_least=1,
        suffixes=True,
        help="maximum tokens per step (default: 2048 for a server, 8192 offline; without chunked prefill at least "
        "the longest request)",
    )
    max_prefill_tokens: int | None = option(
        None,
        at_least=0,
        suffixes=True,
        help="maximum prompt tokens of several requests per step, beside which a longer prompt is alone; 0 for no "
        "limit (default: 256 for a server on a CPU, else 0)",
    )
    max_itl_ms: float | None = option(
        None,
        at_least=0,
        metavar="MS",
        help="cut prompts so that a step beside running streams takes at most so long, as predicted from the steps "
        "before; 0 for no limit (default: for a server on a CPU three to eight times the step of the streams alone, "
        "by what a step costs, else 0)",
    )
    speculative_config: Mapping[str, object] | None = option(
        None,
        short="-sc",
        check=check_speculative_config,
        key_flags=SPECULATION_FLAGS,
        help="how draft tokens are guessed; prompt_lookup_max and prompt_lookup_min bound the n-grams, and the "
        "method 'none' makes no drafts (default: on a CPU, n-gram drafts where they are expected to repay their cost)",
        example='{"method": "ngram", "num_speculative_tokens": 5}',
    )
    structured_outputs_config: Mapping[str, object] | None = option(
        None,
        check=check_structured_outputs_config,
        key_flags={"--guided-decoding-backend": "backend"},
        help="options of structured output",
        example='{"backend": "auto", "disable_any_whitespace": true}',
    )
    scheduling_policy: SchedulingPolicyName = option(
        "fair",
        help="order of waiting requests: 'fcfs' by arrival, 'priority' by the field of the request, 'fair' API keys in "
        "turn, 'deadline' API keys in turn with the earliest deadline of each first",
    )
    max_num_queued_reqs: int | None = option(
        None,
        at_least=1,
        help="maximum unfinished requests; further ones are answered with 503 (default: 1024 for a server, or four "
        "times --max-num-seqs where that is more; no limit offline)",
    )
    max_num_queued_tokens: int | None = option(
        None,
        at_least=1,
        suffixes=True,
        help="maximum prompt tokens of requests without a first token; further requests are answered with 503 "
        "(default: 1024 for each request of --max-num-queued-reqs for a server; no limit offline)",
    )
    stream_interval: int = option(1, at_least=1, help="tokens per chunk of a stream, after the first chunk")
    disable_log_stats: bool = option(False, help="collect no statistics of the engine")
    profiler_config: Mapping[str, object] | None = option(
        None,
        check=check_profiler_config,
        help="record profiles into a folder, from POST /start_profile to POST /stop_profile",
        example='{"profiler": "torch", "torch_profiler_dir": "./traces"}',
    )
