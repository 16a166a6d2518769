"""Limits of the running model, and the checks of sizes that need no tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmstack_llm import request_errors
from llmstack_types import PoolingType

if TYPE_CHECKING:
    from llmstack_llm.model.config import ModelConfig
    from llmstack_types import EngineReady

MAX_LOGPROBS = 20
ASSUMED_CHARS_PER_TOKEN = 128
"""Used where the tokenizer can drop characters, so that no maximum is known; the longest tokens of vocabularies."""
MIN_ASSUMED_CHARS = 1 << 18
"""The bound where none is known is at least this; so many characters take 0.2 s."""

MAX_SHARE_OF_FREE = 4
"""What one tenant may use of a bounded queue, in terms of what is free: alone four fifths of it."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits that a request is checked against.

    Attributes:
        max_model_len: Prompt and output together, in tokens.
        vocab_size: Width of the logits.
        num_kv_tokens: Tokens the whole KV cache holds; None before that is known.
        max_num_completions: Prompts times `n` in one request.
        embedding_size: Width of the model's vectors; 0 where it has none.
        is_generative: False for a model that only pools.
        is_causal: False for an encoder.
        num_labels: Labels of a classifier; 0 for any other model.
        labels_tokens: Whether it labels each token, and not the prompt.
        label_pooling: The states of a prompt that its head reads; None for the usual ones of its kind.
        gives_token_vectors: Whether the model was trained for a vector of each token, and not of the prompt.
        matryoshka_dimensions: The sizes to which vectors may be cut; empty where no file says so, and any may be asked.
        alignment_size: Numbers of each token under the task `alignment`; 0 where there is no such task.
        num_token_types: 2 for a model that distinguishes the two texts of a pair.
        max_logprobs: Most likely tokens that may be requested at each position.
        prompt_embeds_size: Width of the vectors that a prompt may have in place of tokens; 0 where it may not.
        max_item_vectors: So many of them are one item of the prompt at most.
        placeholders: Tokens that stand for media, by id. A prompt has them only where its media are.
        dtype: The type in which the model computes, and of such vectors.
        has_token_bytes: Whether the bytes of each token are known.
        max_source_tokens: The longest prompt of an encoder beside a decoder; 0 for any other model.
        max_request_tokens: The longest request that can ever run, in tokens; follows from the others.
    """

    max_model_len: int
    vocab_size: int
    num_kv_tokens: int | None = None
    max_num_completions: int = 1024
    embedding_size: int = 0
    is_generative: bool = True
    is_causal: bool = True
    num_labels: int = 0
    labels_tokens: bool = False
    label_pooling: PoolingType | None = None
    gives_token_vectors: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    alignment_size: int = 0
    num_token_types: int = 1
    max_logprobs: int = MAX_LOGPROBS
    prompt_embeds_size: int = 0
    max_item_vectors: int = 1
    placeholders: Mapping[int, str] = field(default_factory=dict)
    dtype: str = ""
    has_token_bytes: bool = True
    max_source_tokens: int = 0
    max_request_tokens: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        longest = self.max_model_len if self.num_kv_tokens is None else min(self.max_model_len, self.num_kv_tokens)
        object.__setattr__(self, "max_request_tokens", longest)

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt, whether or not anything can be generated behind it."""
        return self.max_source_tokens or self.max_request_tokens


def limits_of(model_config: ModelConfig) -> AdmissionLimits:
    """The limits of a model, before an engine core says its own."""
    return AdmissionLimits(
        model_config.max_model_len,
        model_config.vocab_size,
        num_token_types=model_config.num_token_types,
        labels_tokens=model_config.labels_tokens,
        gives_token_vectors=model_config.gives_token_vectors,
        matryoshka_dimensions=model_config.matryoshka_dimensions,
        label_pooling=model_config.label_pooling,
        max_logprobs=model_config.max_logprobs,
    )


def limits_with(limits: AdmissionLimits, ready: EngineReady) -> AdmissionLimits:
    """The limits of a model in an engine core."""
    media = ready.media if ready.media is not None and "embeds" in ready.media.num_layers else None
    return replace(
        limits,
        max_model_len=min(limits.max_model_len, ready.max_model_len),
        vocab_size=min(limits.vocab_size, ready.vocab_size),
        num_kv_tokens=ready.num_kv_tokens or ready.num_blocks * ready.block_size,
        embedding_size=ready.embedding_size,
        is_generative=ready.is_generative,
        is_causal=ready.is_causal,
        num_labels=ready.num_labels,
        alignment_size=0 if ready.media is None else ready.media.alignment_size,
        prompt_embeds_size=0 if media is None else media.vector_size,
        max_item_vectors=1 if media is None else media.max_num_tokens["embeds"],
        dtype=ready.dtype,
        max_source_tokens=0 if ready.media is None else ready.media.max_num_tokens.get("text", 0),
    )


def check_fan_out(num_prompts: int, n: int, limits: AdmissionLimits, *, param: str = "prompt") -> None:
    """Refuses a request whose prompts times `n` is over the budget; call it before anything is tokenized.

    Raises:
        InvalidRequestError: Code `request_budget_exceeded`, or `empty_array` for no prompts at all.
    """
    if num_prompts == 0:
        raise request_errors.empty_array(param)
    if num_prompts * n > limits.max_num_completions:
        raise request_errors.request_budget_exceeded(param, num_prompts, n, limits.max_num_completions)


def max_prompt_chars(limits: AdmissionLimits, max_chars_per_token: int | None, *, is_cut: bool = False) -> int:
    """The longest text that is tokenized.

    A longer one cannot fit, whatever its tokens are. Where the tokenizer can drop characters (`max_chars_per_token` is
    None) or the tokens are cut (`is_cut`), any length could fit, and the bound limits the work.
    """
    if max_chars_per_token is not None and not is_cut:
        return max_chars_per_token * limits.max_prompt_tokens
    return max((max_chars_per_token or ASSUMED_CHARS_PER_TOKEN) * limits.max_prompt_tokens, MIN_ASSUMED_CHARS)


def check_prompt_chars(
    num_chars: int, limits: AdmissionLimits, max_chars_per_token: int | None, *, param: str, is_cut: bool = False
) -> None:
    """Refuses, before it is tokenized, a text longer than `max_prompt_chars`.

    Raises:
        InvalidRequestError: Code `context_length_exceeded`.
    """
    if num_chars > max_prompt_chars(limits, max_chars_per_token, is_cut=is_cut):
        raise request_errors.context_length_exceeded(param, limits.max_prompt_tokens, None)


def exceeds_share(num_new: int, num_free: int, num_used: int) -> bool:
    """Whether a tenant would use more than its share of a queue, so that too little is left to the others."""
    return num_used > 0 and num_used + num_new > MAX_SHARE_OF_FREE * num_free
