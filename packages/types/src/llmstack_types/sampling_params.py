"""Choice of the tokens of one request, by vLLM's field names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from llmstack_types.field_facts import INT64_MAX, INT64_MIN, declared
from llmstack_types.structured_outputs_params import StructuredOutputsParams

MAX_PATTERN_SIZE = 256
"""Tokens of the longest pattern of repeated tokens that is looked for."""


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
    `LLM.generate`. Each field is declared here alone, with its `FieldFacts`. Of several that are wrong in a request
    the first one here is named.

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
        top_n_sigma: Keeps the tokens whose logits are at most so many standard deviations below the best one, as in
            llama.cpp; 0 and less are off. It comes before typical-p, top-k and top-p.
        infill: Chooses between the end of a gap and a text for it, as llama.cpp's sampler of that name, among
            the tokens that all others leave. Tokens that end the completion are its ends.
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
        forced_bos_token_id: The first token behind the decoder's own, of a model whose prompts go to an encoder.
        forced_eos_token_id: The token that ends a beam which is as long as it may be, whatever its probability.
    """

    n: int = declared(1, 1, 128)
    best_of: int | None = declared(None, 1, 20, is_recorded=False)
    use_beam_search: bool = declared(False)
    length_penalty: float = declared(1.0, -10.0, 10.0)  # ten thousand tokens to the tenth power is still a float
    early_stopping: bool | str = declared(False, help="a boolean, or 'never'")
    temperature: float = declared(1.0, 0.0, 2.0)
    top_p: float = declared(1.0, 0.0, 1.0, excludes_minimum=True)
    top_k: int = declared(0, -1, INT64_MAX)
    min_p: float = declared(0.0, 0.0, 1.0)
    typical_p: float = declared(1.0, 0.0, 1.0, excludes_minimum=True, is_for_host=True)
    top_n_sigma: float = declared(
        -1.0,
        -1.0,
        1000.0,
        is_for_host=True,
        help="standard deviations below the best logit within which tokens are kept",
    )
    infill: bool = declared(False, given_by="none", is_for_host=True)
    presence_penalty: float = declared(0.0, -2.0, 2.0)
    frequency_penalty: float = declared(0.0, -2.0, 2.0)
    # vLLM allows anything above 0; beyond these ends float32 logits overflow and the row turns to NaN.
    repetition_penalty: float = declared(1.0, 0.01, 100.0)
    seed: int | None = declared(None, INT64_MIN, INT64_MAX)
    max_tokens: int | None = declared(16, 0, INT64_MAX)
    min_tokens: int = declared(0, 0, INT64_MAX)
    logprobs: int | None = None
    prompt_logprobs: int | None = declared(None)
    ignore_eos: bool = declared(False)
    detokenize: bool = declared(True, given_by="none", is_recorded=False)
    skip_special_tokens: bool = declared(True, is_recorded=False)
    spaces_between_special_tokens: bool = declared(True, is_recorded=False)
    include_stop_str_in_output: bool = declared(False, is_recorded=False)
    output_kind: RequestOutputKind = declared(RequestOutputKind.CUMULATIVE, given_by="none", is_recorded=False)
    kept_special_tokens: tuple[str, ...] = declared((), given_by="none", is_recorded=False)
    stream_interval: int = declared(
        1, 1, 1 << 20, is_recorded=False, is_sent=False, help="tokens between two chunks of a stream, after the first"
    )
    stop: str | tuple[str, ...] | list[str] | None = declared(
        None, is_recorded=False, help="a string, or up to 16 strings"
    )
    stop_token_ids: tuple[int, ...] | list[int] | None = declared(None)
    allowed_token_ids: tuple[int, ...] | list[int] | None = declared(None, is_for_host=True)
    logprob_token_ids: tuple[int, ...] | list[int] | None = declared(
        None, given_by="answers", is_recorded=False, is_for_host=True, help="tokens to report besides the chosen ones"
    )
    thinking_token_budget: int | None = declared(
        None, -1, 2**31 - 1, given_by="answers", is_recorded=False, is_for_host=True,
        help="tokens of reasoning before it is ended; -1: no limit",
    )  # fmt: skip
    thinking_tags: ThinkingTags | None = declared(None, given_by="none", is_recorded=False)
    forced_bos_token_id: int | None = declared(
        None, 0, 2**31 - 1, is_recorded=False,
        help="the decoder's first token in a model with an encoder, such as that of a language",
    )  # fmt: skip
    forced_eos_token_id: int | None = declared(
        None, 0, 2**31 - 1, is_recorded=False, help="the token that ends a beam which is as long as it may be"
    )
    truncation_side: str = declared(
        "left", is_recorded=False, is_sent=False, help="where tokens are dropped: left (the default) or right"
    )
    extra_args: Mapping[str, Any] | None = declared(None, given_by="none", is_recorded=False)
    bad_words: tuple[str, ...] | list[str] | None = declared(None, is_recorded=False)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = declared(
        (), given_by="none", is_recorded=False, is_for_host=True
    )
    logit_bias: Mapping[int, float] | None = declared(None, is_for_host=True)
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = declared(
        None, is_recorded=False, is_sent=False, help="prompt tokens to keep; -1 keeps what fits"
    )
    repetition_detection: RepetitionDetectionParams | None = declared(
        None, given_by="answers", help="ends an answer that repeats a pattern"
    )
    # A token costs as many comparisons, 10 µs.
    no_repeat_ngram_size: int = declared(
        0, 0, MAX_PATTERN_SIZE, is_recorded=False, is_for_host=True, help="no sequence of so many tokens occurs twice"
    )

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
