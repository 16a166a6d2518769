"""Options of the scheduler, its queue, drafts and records of steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from llmstack_llm.engine_options.speculation import SPECULATION_FLAGS, check_speculative_config
from llmstack_llm.options.option import OptionGroup, option, option_group
from llmstack_types.vocabulary import SchedulingPolicyName


def check_profiler_config(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a `ProfilerConfig`, with an absolute folder: the engine core's process may stand in another one."""
    from llmstack_engine_core.config import ProfilerConfig  # late: `--help` needs none
    from llmstack_types.plain_data import from_plain, to_plain

    config = from_plain(ProfilerConfig, value)
    return to_plain(config) | {"torch_profiler_dir": os.path.abspath(config.torch_profiler_dir)}


def check_structured_outputs_config(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a `StructuredOutputsConfig`."""
    from llmstack_llm.admission.structured_outputs import read_structured_outputs_config  # late: `--help` needs none

    read_structured_outputs_config(value)
    return value


@option_group
class SchedulingOptions(OptionGroup):
    """Which requests run in a step, and how many wait."""

    title = "Scheduling"

    max_num_seqs: int = option(256, flag="--max-num-seqs", at_least=1, metavar="N", help="maximum requests per step")
    max_num_batched_tokens: int | None = option(
        None,
        flag="--max-num-batched-tokens",
        at_least=1,
        suffixes=True,
        metavar="N",
        help="maximum tokens per step (default: 2048 for a server, 8192 offline; without chunked prefill at least "
        "the longest request)",
    )
    enable_chunked_prefill: bool = option(
        True, flag="--enable-chunked-prefill", help="split long prompts over several steps"
    )
    long_prefill_token_threshold: int = option(
        0,
        flag="--long-prefill-token-threshold",
        at_least=0,
        suffixes=True,
        metavar="N",
        help="maximum tokens of one request per step; 0 for no limit",
    )
    max_prefill_tokens: int | None = option(
        None,
        flag="--max-prefill-tokens",
        at_least=0,
        suffixes=True,
        metavar="N",
        help="maximum prompt tokens of several requests per step, beside which a longer prompt is alone; 0 for no "
        "limit (default: 256 for a server on a CPU, else 0)",
    )
    max_itl_ms: float | None = option(
        None,
        flag="--max-itl-ms",
        at_least=0,
        metavar="MS",
        help="cut prompts so that a step beside running streams takes at most so long, as predicted from the steps "
        "before; 0 for no limit (default: for a server on a CPU eight times the step of the streams alone, else 0)",
    )
    max_num_partial_prefills: int = option(
        0,
        flag="--max-num-partial-prefills",
        at_least=0,
        metavar="N",
        help="maximum requests with partly computed prompts; 0 for no limit",
    )
    state_snapshot_interval: int = option(
        0,
        flag="--state-snapshot-interval",
        at_least=0,
        suffixes=True,
        metavar="N",
        help="for models with convolutions or another state: keep the state of every N tokens of a prompt for later "
        "requests, beside that of its end; 0 keeps the states where its chunks end",
    )
    encoder_cache_tokens: int = option(
        0,
        flag="--encoder-cache-tokens",
        at_least=0,
        suffixes=True,
        metavar="N",
        help="for models that take media: keep up to N vectors of encoded items; a larger item is refused (default: "
        "the tokens of a step, or the largest item)",
    )
    encoder_budget_units: int = option(
        0,
        flag="--encoder-budget-units",
        at_least=0,
        suffixes=True,
        metavar="N",
        help="for models that take media: encode up to N patches or frames in a step with requests that generate; "
        "larger items take several steps (default: on a CPU what costs as much as the step without it; else the tokens "
        "of a step; of speech four times as much, while more requests wait than generate)",
    )
    async_scheduling: bool | None = option(
        None,
        flag="--async-scheduling",
        help="schedule the next step before the tokens of the last one arrive (default: on a GPU without "
        "--speculative-config)",
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        flag="--speculative-config",
        short="-sc",
        check=check_speculative_config,
        metavar="JSON",
        key_flags=SPECULATION_FLAGS,
        help="how draft tokens are guessed; prompt_lookup_max and prompt_lookup_min bound the n-grams, and the "
        "method 'none' makes no drafts (default: on a CPU, n-gram drafts where they are expected to repay their cost)",
        example='{"method": "ngram", "num_speculative_tokens": 5}',
    )
    structured_outputs_config: Mapping[str, Any] | None = option(
        None,
        flag="--structured-outputs-config",
        check=check_structured_outputs_config,
        metavar="JSON",
        key_flags={"--guided-decoding-backend": "backend"},
        help="options of structured output",
        example='{"backend": "auto", "disable_any_whitespace": true}',
    )
    scheduling_policy: SchedulingPolicyName = option(
        "fair",
        flag="--scheduling-policy",
        help="order of waiting requests: 'fcfs' by arrival, 'priority' by the field of the request, 'fair' API keys in "
        "turn, 'deadline' API keys in turn with the earliest deadline of each first",
    )
    fair_quantum: int = option(
        2048,
        flag="--fair-quantum",
        at_least=1,
        suffixes=True,
        metavar="N",
        help="tokens of one API key's requests that are admitted before the next key has its turn, under the policies "
        "'fair' and 'deadline'",
    )
    max_num_queued_reqs: int | None = option(
        None,
        flag="--max-num-queued-reqs",
        at_least=1,
        metavar="N",
        help="maximum unfinished requests; further ones are answered with 503 (default: 1024 for a server, or four "
        "times --max-num-seqs where that is more; no limit offline)",
    )
    max_num_queued_tokens: int | None = option(
        None,
        flag="--max-num-queued-tokens",
        at_least=1,
        suffixes=True,
        metavar="N",
        help="maximum prompt tokens of requests without a first token; further requests are answered with 503 "
        "(default: 1024 for each request of --max-num-queued-reqs for a server; no limit offline)",
    )
    stream_interval: int = option(
        1,
        flag="--stream-interval",
        at_least=1,
        metavar="N",
        help="tokens per chunk of a stream, after the first chunk",
    )
    disable_log_stats: bool = option(False, flag="--disable-log-stats", help="collect no statistics of the engine")
    record_steps: str | None = option(
        None,
        flag="--record-steps",
        metavar="FILE",
        replaces={"--enable-trace-replay": ("false", "0")},
        help="write a log of every step with all token ids, for `llmstack replay` (default: the last steps in memory)",
    )
    step_log_bytes: int = option(
        8 << 20, flag="--step-log-bytes", at_least=0, at_most=1 << 27, metavar="N",
        help="memory for the log of the last steps (GET /steps/log), without --record-steps; 0 keeps none",
    )  # fmt: skip
    snapshot_steps: int = option(
        4096, flag="--snapshot-steps", at_least=0, metavar="N",
        help="steps between two snapshots in the log of steps, at least 64; 0 writes none",
    )  # fmt: skip
    shadow_scheduler: str | None = option(
        None,
        flag="--shadow-scheduler",
        metavar="CHANGES",
        help="compare with another scheduler, which runs on the same requests without effect: settings separated by "
        "commas, a policy, or module:Class",
        example="max_num_batched_tokens=512,policy=fair",
    )
    profiler_config: Mapping[str, Any] | None = option(
        None,
        flag="--profiler-config",
        check=check_profiler_config,
        metavar="JSON",
        help="record profiles into a folder, from POST /start_profile to POST /stop_profile",
        example='{"profiler": "torch", "torch_profiler_dir": "./traces"}',
    )
