"""Validation of the sampling fields of one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission.choice import CHOICE_FIELDS, check_choice, is_chosen_at_end
from llmstack_llm.admission.fields import FIELD_CHECKS
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.structured_outputs import normal_constraint
from llmstack_types import RequestOutputKind, SamplingParams, StructuredOutputsParams, ThinkingTags

MAX_INFILL_CANDIDATES = 256
"""Candidates of the sampler `infill`; it compares their texts, at worst each with each."""
MAX_REPEATED_IDS = 1 << 22
"""Token ids that all completions of a request have together as one of its fields: 16 MiB on their way to the engine."""
MAX_PROMPT_LOGPROBS = 1 << 22
"""Log-probabilities of prompts in one answer, where each completion may repeat those of its prompt."""
NO_NAMES: Mapping[str, str] = {}
NO_DEFAULTS: Mapping[str, Any] = {}
_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class GivenSampling:
    """Sampling fields as a request gives them, unchecked; `AsyncLLM` checks them before it tokenizes anything.

    Attributes:
        values: Field of `SamplingParams` to its value, of whatever type the request has; absent ones are defaults.
        names: The request's names of fields where they differ, for errors.
        is_echo: Allows `max_tokens` 0.
    """

    values: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_echo: bool = False


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Sampling fields of one request after every check that needs no prompt.

    `check_sampling` makes them. The `SamplingParams` are made of them once, when the prompt's length is known.

    Attributes:
        values: Field of `SamplingParams` to its value in normal form; absent fields have their defaults.
        names: The request's names of fields where they differ, for errors.
    """

    values: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_generated(self) -> int:
        """Completions to generate for each prompt."""
        return int(self.values.get("best_of") or self.values.get("n", 1))

    def check_repeated_ids(self, num_completions: int, bad_words: Sequence[Sequence[int]] = ()) -> None:
        """Refuses lists of token ids of which several completions would have too many: each of them has all.

        `bad_words`: Once they are token ids.

        Raises:
            InvalidRequestError: Code `array_above_max_length`.
        """
        allowed = self.values.get("allowed_token_ids") or ()
        for name, num_ids in (("allowed_token_ids", len(allowed)), ("bad_words", sum(map(len, bad_words)))):
            if num_ids * num_completions > MAX_REPEATED_IDS:
                most = MAX_REPEATED_IDS // num_completions
                raise request_errors.array_too_long(self.names.get(name, name), most, num_ids)

    def check_prompt_logprobs(self, num_prompt_tokens: int) -> None:
        """Refuses log-probabilities of prompts of which one answer may have too many.

        `num_prompt_tokens`: Of all prompts.

        Raises:
            InvalidRequestError: Code `request_budget_exceeded`.
        """
        num_top = self.values.get("prompt_logprobs")
        num_numbers = 0 if num_top is None else num_prompt_tokens * (num_top + 1) * self.num_generated
        if num_numbers > MAX_PROMPT_LOGPROBS:
            name = self.names.get("prompt_logprobs", "prompt_logprobs")
            raise request_errors.answer_too_large(name, MAX_PROMPT_LOGPROBS, num_numbers)

    def with_constraint(self, constraint: StructuredOutputsParams, names: Mapping[str, str]) -> CheckedSampling:
        """The same fields under a constraint in its normal form; `names` are added to the names.

        Raises:
            InvalidRequestError: It is malformed, or excludes another field.
        """
        names = {**self.names, **names}
        if self.values.get("use_beam_search"):
            reason = "a demanded call, or another constraint on the output, cannot be combined with it"
            raise request_errors.invalid_value(names.get("use_beam_search", "use_beam_search"), reason)
        normal = normal_constraint(constraint, self.values, names)
        return CheckedSampling({**self.values, "structured_outputs": normal}, names)

    def with_thinking_tags(self, tags: ThinkingTags | None) -> CheckedSampling:
        """The same fields, with the tokens around reasoning; None for an answer that has no reasoning to limit."""
        given = {"thinking_tags": tags} if tags is not None else {"thinking_token_budget": None}
        return CheckedSampling({**self.values, **given}, self.names)

    def with_kept_tokens(self, kept_special_tokens: tuple[str, ...]) -> CheckedSampling:
        """The same fields, with special tokens that appear in the text."""
        return CheckedSampling({**self.values, "kept_special_tokens": kept_special_tokens}, self.names)


NO_SAMPLING = CheckedSampling({})


def given_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields in which `params` differ from the defaults, and `max_tokens`.

    Raises:
        InvalidRequestError: It is something else, such as a dict.
    """
    if not isinstance(params, SamplingParams):
        raise request_errors.invalid_type("sampling_params", "SamplingParams", params)
    given = {name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) is not default}
    if params.use_beam_search:  # in place of the model's own
        given["min_tokens"] = params.min_tokens
    return given | {"max_tokens": params.max_tokens}


def check_sampling(
    given: Mapping[str, object],
    limits: AdmissionLimits,
    names: Mapping[str, str] = NO_NAMES,
    *,
    is_echo: bool = False,
    defaults: Mapping[str, object] = NO_DEFAULTS,
) -> CheckedSampling:
    """Checks the fields that a request gives: first each alone, then those that exclude each other.

    `names`: Names of the fields where they differ from `SamplingParams`, such as `top_logprobs` for `logprobs`.
    `is_echo`: Allows `max_tokens` 0.
    `defaults`: The model's own, checked and in normal form.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    if not limits.is_generative:
        raise request_errors.generation_not_supported()
    values = {**defaults, **given}
    for field, check in FIELD_CHECKS.items():
        if field in given:
            values[field] = check(names.get(field, field), given[field], limits)
    if values.get("logprob_token_ids"):
        if values.get("logprobs") is None:
            name, other = (names.get(field, field) for field in ("logprob_token_ids", "logprobs"))
            raise request_errors.invalid_value(name, f"it is only allowed together with '{other}'")
        values["logprobs"] = 0  # they are reported in place of the most likely ones
    _check_together(values, names, limits, is_echo)
    if not CHOICE_FIELDS.isdisjoint(values):
        check_choice({**_DEFAULTS, **values}, names)
        if is_chosen_at_end(values):
            values["output_kind"] = RequestOutputKind.FINAL_ONLY
    if values.get("stop") and not values.get("detokenize", True):
        raise request_errors.invalid_value(names.get("stop", "stop"), "stop strings need 'detokenize'")
    if values.get("structured_outputs") is not None:
        values["structured_outputs"] = normal_constraint(values["structured_outputs"], values, names)
    return CheckedSampling(values, names)


def resolve_max_tokens(
    sampling: CheckedSampling,
    num_prompt_tokens: int,
    limits: AdmissionLimits,
    *,
    param: str = "prompt",
    default_max_tokens: int | None = None,
) -> int:
    """The most tokens that a completion may have: the one check that needs the prompt's length.

    `param`: The request's name of the prompt.
    `default_max_tokens`: Used, cut to what fits, where `max_tokens` is None; None means all that fits.

    Raises:
        InvalidRequestError: The prompt, or the prompt with `max_tokens`, does not fit.
    """
    names, max_len, max_tokens = sampling.names, limits.max_request_tokens, sampling.values.get("max_tokens")
    if num_prompt_tokens >= max_len:
        raise request_errors.context_length_exceeded(param, max_len, num_prompt_tokens)
    num_left = max_len - num_prompt_tokens
    if max_tokens is None:
        max_tokens = num_left if default_max_tokens is None else min(default_max_tokens, num_left)
        if sampling.values.get("min_tokens", 0) > max_tokens:
            name = names.get("min_tokens", "min_tokens")
            raise request_errors.invalid_value(name, f"only {max_tokens} tokens can be generated here")
    elif max_tokens > limits.max_model_len:
        name = names.get("max_tokens", "max_tokens")
        raise request_errors.max_tokens_too_large(name, max_tokens, limits.max_model_len)
    elif max_tokens > num_left:
        raise request_errors.context_length_exceeded(param, max_len, num_prompt_tokens, max_tokens)
    return int(max_tokens)


def _check_infill(values: Mapping[str, Any], names: Mapping[str, str], limits: AdmissionLimits) -> None:
    """Its work is bounded by the candidates that top-k leaves, whose bytes it compares."""
    if not limits.has_token_bytes:
        reason = "the sampler 'infill' needs the bytes of tokens, which this model's tokenizer does not tell"
        raise request_errors.invalid_value(names.get("infill", "infill"), reason)
    if not 1 <= values.get("top_k", 0) <= MAX_INFILL_CANDIDATES:
        reason = f"with the sampler 'infill' it must be from 1 to {MAX_INFILL_CANDIDATES}"
        raise request_errors.invalid_value(names.get("top_k", "top_k"), reason)


def _check_together(
    values: Mapping[str, Any], names: Mapping[str, str], limits: AdmissionLimits, is_echo: bool
) -> None:
    if values.get("infill"):
        _check_infill(values, names, limits)
    max_tokens, min_tokens = values.get("max_tokens"), values.get("min_tokens", 0)
    max_name = names.get("max_tokens", "max_tokens")
    if max_tokens == 0 and not is_echo:
        raise request_errors.below_min(max_name, 1, 0, is_integer=True)
    if max_tokens is not None and min_tokens > max_tokens:
        raise request_errors.invalid_value(names.get("min_tokens", "min_tokens"), f"must not be above '{max_name}'")
