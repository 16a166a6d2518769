"""Outputs of a request, under vLLM's field names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmstack_llm.adapters import LoRARequest

if TYPE_CHECKING:
    from llmstack_types import EngineReady


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability.

    Attributes:
        rank: Rank in the whole vocabulary, 1 is the most likely; None where it is not known.
        decoded_token: The token alone as text; a broken character shows as U+FFFD.
        token_bytes: The token's bytes where it has a broken character; None where `decoded_token` has all of them.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in monotonic seconds of the front end. Grows until the request has ended.

    Attributes:
        arrival_time_s: The request came to the front end.
        first_token_time_s: The step that made its first token had ended; None before.
        last_token_time_s: When the newest token came, on the same clock.
        num_generation_tokens: Tokens of all completions so far.
        queued_time_s: The engine core had taken it over; None before, and where statistics are off.
        scheduled_time_s: It got its blocks and its place in a step, for the first time; None as above.
        num_preemptions: How often its completions had to give up their blocks.
        scheduler_time_s: Time from then to its end that the engine core spent choosing what to compute and taking
            results over; 0 before the end.
        model_time_s: The same for the model's part of the steps, other requests included.
    """

    arrival_time_s: float
    first_token_time_s: float | None = None
    last_token_time_s: float | None = None
    num_generation_tokens: int = 0
    queued_time_s: float | None = None
    scheduled_time_s: float | None = None
    num_preemptions: int = 0
    scheduler_time_s: float = 0.0
    model_time_s: float = 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request; `RequestOutputKind` decides whether it holds everything or only what is new.

    Attributes:
        index: Which of the request's `n` completions.
        text: Empty if the request asked for no detokenization.
        token_ids: Every token sampled, an end-of-sequence or stop token too.
        cumulative_logprob: Sum over the chosen tokens so far; None without logprobs.
        logprobs: Per token the chosen one (first) and the most likely ones.
        finish_reason: `stop`, `length`, `abort` or `error`; None while it goes on.
        stop_reason: The stop string or stop token id that ended it; None for the end of sequence.
        lora_request: The adapter that it was generated with, if any.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """True once the completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request, in whole or since the last output.

    Attributes:
        prompt: The text; None where token ids were given.
        prompt_logprobs: One entry per prompt token, the first None; None where not asked for. Those of an `AsyncLLM`
            are made as they are read.
        outputs: By index; a streamed output holds only those completions that have something new.
        finished: All completions have ended; no output follows.
        num_cached_tokens: Prompt tokens found in the prefix cache; None until the first token.
        num_dropped_tokens: Tokens of completions that `best_of` generated and did not choose.
        prompt_index: Which of the prompts that were submitted together.
        kv_transfer_params: The field for the request in another engine, of one whose blocks are exported.
        engines: The engine cores that computed it so far, in order; empty where none can be exchanged.
        lora_request: The adapter that it was generated with, if any.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    num_dropped_tokens: int = 0
    prompt_index: int = 0
    lora_request: LoRARequest | None = None
    kv_transfer_params: dict[str, object] | None = None
    engines: tuple[EngineReady, ...] = field(default=(), repr=False)
