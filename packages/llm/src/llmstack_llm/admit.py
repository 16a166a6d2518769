"""The one door for request values: whatever comes over HTTP or from `LLM.generate` is checked and resolved here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmstack_llm import request_errors
from llmstack_llm.admit_choice import check_choice
from llmstack_llm.admit_rules import MAX_LOGPROBS, check_token_ids, check_values, normal_logit_bias
from llmstack_llm.bad_words import check_bad_words, check_bad_words_token_ids
from llmstack_llm.structured_outputs import admit_constraint
from llmstack_types import RequestOutputKind, SamplingParams

GREEDY_BELOW_TEMPERATURE = 1e-5
LOWEST_TEMPERATURE = 0.01
_NO_NAMES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What the running model can take.

    Attributes:
        max_model_len: Prompt and output together, in tokens.
        vocab_size: Width of the logits.
        num_kv_tokens: Tokens the whole KV cache holds; None before that is known.
        max_num_completions: Prompts times `n` in one request.
        embedding_size: Width of the model's vectors; 0 where it has none.
        is_generative: False for a model that only pools.
        is_causal: False for an encoder.
        num_labels: What the model tells prompts apart by; 0 for a model that is no classifier.
        num_token_types: 2 for a model that is told which text of a pair a token belongs to.
        max_logprobs: Most likely tokens that may be asked for at each place.
    """

    max_model_len: int
    vocab_size: int
    num_kv_tokens: int | None = None
    max_num_completions: int = 1024
    embedding_size: int = 0
    is_generative: bool = True
    is_causal: bool = True
    num_labels: int = 0
    num_token_types: int = 1
    max_logprobs: int = MAX_LOGPROBS

    @property
    def max_request_tokens(self) -> int:
        """The longest request that can ever run."""
        return self.max_model_len if self.num_kv_tokens is None else min(self.max_model_len, self.num_kv_tokens)


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A prompt and its parameters after every check; what `admit_request` returns is the only way to make one.

    Attributes:
        prompt: The text, or None where token ids were given.
        sampling_params: `max_tokens` is set; `seed` may still be None; 0 `max_tokens` means that nothing is generated.
        param: What the user calls the prompt.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    param: str = field(default="prompt", compare=False)


def admit_request(
    prompt: str | None,
    prompt_token_ids: list[int],
    sampling_params: SamplingParams,
    limits: AdmissionLimits,
    *,
    param: str = "prompt",
    param_names: Mapping[str, str] = _NO_NAMES,
    default_max_tokens: int | None = None,
    is_echo: bool = False,
) -> AdmittedRequest:
    """Checks and resolves one prompt with its parameters.

    `param`: What the user calls the prompt, for the errors.
    `param_names`: Names of the fields where they differ from `SamplingParams`, such as `top_logprobs` for `logprobs`.
    `default_max_tokens`: Used, clamped to what fits, where `max_tokens` is None; None means all that fits.
    `is_echo`: Allows `max_tokens` 0.

    Raises:
        InvalidRequestError: Names the first field at fault: ids and values first, lengths after them.
    """
    params = admit_sampling_params(sampling_params, limits, param_names=param_names, is_echo=is_echo)
    check_token_ids(param, prompt_token_ids, limits.vocab_size)
    if not prompt_token_ids:
        raise request_errors.empty_array(param)
    params = _resolve_lengths(params, len(prompt_token_ids), limits, param, param_names, default_max_tokens)
    return AdmittedRequest(prompt, list(prompt_token_ids), params, param)


def admit_sampling_params(
    params: SamplingParams,
    limits: AdmissionLimits,
    *,
    param_names: Mapping[str, str] = _NO_NAMES,
    is_echo: bool = False,
) -> SamplingParams:
    """Checks the parameters as far as that needs no prompt, and gives them their normal form.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """

    def name(field_name: str) -> str:
        return param_names.get(field_name, field_name)

    if not limits.is_generative:
        raise request_errors.generation_not_supported()
    check_values(params, limits.vocab_size, name, max_logprobs=limits.max_logprobs)
    check_bad_words(name("bad_words"), params.bad_words)
    check_bad_words_token_ids(name("bad_words_token_ids"), params.bad_words_token_ids, limits.vocab_size)
    logit_bias = normal_logit_bias(name("logit_bias"), params.logit_bias, limits.vocab_size)
    if params.max_tokens == 0 and not is_echo:
        raise request_errors.below_min(name("max_tokens"), 1, 0, is_integer=True)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise request_errors.invalid_value(name("min_tokens"), f"must not be above '{name('max_tokens')}'")
    check_choice(params, name)
    if params.stop_strings and not params.detokenize:
        raise request_errors.invalid_value(name("stop"), "stop strings need 'detokenize'")
    return dataclasses.replace(
        params,
        structured_outputs=admit_constraint(params, name),
        output_kind=_possible_output_kind(params),
        temperature=_normal_temperature(params.temperature),
        seed=None if params.seed == -1 else params.seed,
        top_k=max(params.top_k, 0),
        stop=params.stop_strings,
        stop_token_ids=None if params.stop_token_ids is None else tuple(params.stop_token_ids),
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        logit_bias=logit_bias,
        bad_words=None if params.bad_words is None else tuple(params.bad_words),
        bad_words_token_ids=tuple(tuple(sequence) for sequence in params.bad_words_token_ids),
        extra_args=None if params.extra_args is None else dict(params.extra_args),
    )


def check_fan_out(num_prompts: int, n: int, limits: AdmissionLimits, *, param: str = "prompt") -> None:
    """Refuses a request whose prompts times `n` is over the budget; called before anything is tokenized.

    Raises:
        InvalidRequestError: Code `request_budget_exceeded`, or `empty_array` for no prompts at all.
    """
    if num_prompts == 0:
        raise request_errors.empty_array(param)
    if num_prompts * n > limits.max_num_completions:
        raise request_errors.request_budget_exceeded(param, num_prompts, n, limits.max_num_completions)


def check_prompt_chars(text: str, limits: AdmissionLimits, max_chars_per_token: int | None, *, param: str) -> None:
    """Refuses, before it is tokenized, a text that cannot fit whatever its tokens are.

    `max_chars_per_token` is None where the tokenizer can drop characters, so that no bound exists.

    Raises:
        InvalidRequestError: Code `context_length_exceeded`.
    """
    if max_chars_per_token is not None and len(text) > max_chars_per_token * limits.max_request_tokens:
        raise request_errors.context_length_exceeded(param, limits.max_request_tokens, None)


def _normal_temperature(temperature: float) -> float:
    """Nearly 0 is greedy; below 0.01 the division overflows, so vLLM raises it there, and so do we."""
    if temperature < GREEDY_BELOW_TEMPERATURE:
        return 0.0
    return max(float(temperature), LOWEST_TEMPERATURE)


def _possible_output_kind(params: SamplingParams) -> RequestOutputKind:
    """What is chosen at the end is told at the end."""
    is_chosen_at_end = params.use_beam_search or params.num_generated > params.n
    return RequestOutputKind.FINAL_ONLY if is_chosen_at_end else params.output_kind


def _resolve_lengths(
    params: SamplingParams,
    num_prompt_tokens: int,
    limits: AdmissionLimits,
    param: str,
    param_names: Mapping[str, str],
    default_max_tokens: int | None,
) -> SamplingParams:
    max_len = limits.max_request_tokens
    max_tokens_name = param_names.get("max_tokens", "max_tokens")
    if num_prompt_tokens >= max_len:
        raise request_errors.context_length_exceeded(param, max_len, num_prompt_tokens)
    num_left = max_len - num_prompt_tokens
    if params.max_tokens is None:
        max_tokens = num_left if default_max_tokens is None else min(default_max_tokens, num_left)
        if params.min_tokens > max_tokens:
            min_tokens_name = param_names.get("min_tokens", "min_tokens")
            raise request_errors.invalid_value(min_tokens_name, f"only {max_tokens} tokens can be generated here")
        return dataclasses.replace(params, max_tokens=max_tokens)
    if params.max_tokens > limits.max_model_len:
        raise request_errors.max_tokens_too_large(max_tokens_name, params.max_tokens, limits.max_model_len)
    if params.max_tokens > num_left:
        raise request_errors.context_length_exceeded(param, max_len, num_prompt_tokens, params.max_tokens)
    return params
