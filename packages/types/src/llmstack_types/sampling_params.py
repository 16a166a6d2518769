"""How the tokens of one request are chosen, under vLLM's field names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from llmstack_types.structured_outputs_params import StructuredOutputsParams


class RequestOutputKind(StrEnum):
    """The contents of each `RequestOutput` of a stream."""

    CUMULATIVE = "cumulative"
    """Everything generated so far."""
    DELTA = "delta"
    """Only what is new since the last output."""
    FINAL_ONLY = "final_only"
    """One output, when the request has finished."""


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """When a completion ends because it repeats itself.

    Attributes:
        max_pattern_size: Tokens of the longest pattern that is looked for; 0 looks for none.
        min_pattern_size: Tokens of the shortest one; 0 counts as 1.
        min_count: How often a pattern must follow itself.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tokens around a model's reasoning.

    Attributes:
        start_token_ids: Tokens that begin it.
        end_token_ids: Tokens that end it; at least one.
        is_open: Whether the prompt ends inside reasoning.
    """

    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Pure data: values are checked in one place, `llmstack_llm.admission`, whether they came over HTTP or from
    `LLM.generate`.

    Attributes:
        n: Number of completions; under `use_beam_search` also the number of beams.
        temperature: 0 is greedy (ties go to the lowest token id).
        top_k: 0 and -1 both mean off.
        seed: None draws one at admission; a draw depends on the seed and the output index only.
        stop: Strings that end a completion; None or empty means none.
        stop_token_ids: Token ids that end a completion, besides the model's end-of-sequence ids.
        max_tokens: None means what the context has left.
        logprobs: Number of most likely tokens to report beside the chosen one; None means no logprobs.
        prompt_logprobs: As `logprobs`, for prompt tokens.
        logprob_token_ids: Tokens to report in place of the most likely ones; None or empty means none.
        best_of: Completions to generate; the `n` with the best mean log-probability per token are returned, best first.
            None means `n`.
        use_beam_search: Finds the `n` best completions by beam search, best first, instead of drawing them.
        length_penalty: A beam's score is its log-probability divided by its length to this power.
        early_stopping: When a beam search ends. True: with `n` complete beams. False: when no running beam, at its
            present length, scores better than the worst of them. "never": when none can, at whatever length.
        typical_p: Keeps the tokens of the most typical surprise that have this mass together; 1 is off.
        bad_words: Strings that must not be generated.
        bad_words_token_ids: The same as token ids, which the sampler masks: the last one of each sequence where
            the others were just generated. The input processor adds those of `bad_words`.
        extra_args: Arguments for custom logits processors: JSON's scalars and lists of them.
        kept_special_tokens: Special tokens that show even where `skip_special_tokens` leaves out the others.
        structured_outputs: The constraint on the completion. The end of the constraint ends the completion, under
            `ignore_eos` and before `min_tokens` too, which only keep it from ending while more could follow.
        repetition_detection: Ends a completion whose last tokens are one pattern, repeated; not before `min_tokens`.
        thinking_token_budget: Tokens of reasoning after which the tokens that end it are forced; None means no limit.
        thinking_tags: Where reasoning begins and ends; without them there is no budget.
        no_repeat_ngram_size: No sequence of so many tokens occurs twice in prompt and completion; 0 is off.
        stream_interval: Tokens of a completion between two outputs of a stream, after the first.
        truncate_prompt_tokens: Tokens of the prompt that are kept; -1 keeps what leaves room for `max_tokens`.
        truncation_side: The side on which tokens are dropped, `left` or `right`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    typical_p: float = 1.0
    bad_words: tuple[str, ...] | list[str] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    extra_args: Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    kept_special_tokens: tuple[str, ...] = ()
    repetition_detection: RepetitionDetectionParams | None = None
    logprob_token_ids: tuple[int, ...] | list[int] | None = None
    thinking_token_budget: int | None = None
    thinking_tags: ThinkingTags | None = None
    no_repeat_ngram_size: int = 0
    stream_interval: int = 1
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"

    @property
    def num_generated(self) -> int:
        """Completions to generate, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its normal form."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
