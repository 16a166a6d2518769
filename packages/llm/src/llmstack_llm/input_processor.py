"""Prompts in every form a caller may use, to the requests the engine core takes."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admit import (
    AdmissionLimits,
    AdmittedRequest,
    admit_request,
    check_prompt_chars,
)
from llmstack_llm.admit_pooling import AdmittedPooling, admit_pooling
from llmstack_llm.admit_rules import check_text
from llmstack_llm.bad_words import BadWordSpelling, num_chars_of_bad_words
from llmstack_llm.model_config import ModelConfig
from llmstack_llm.pooling_prompt import (
    PoolingPrompt,
    TextPair,
    check_truncation,
    cut_token_ids,
    encode_pooling_prompt,
)
from llmstack_llm.seeds import completion_seed
from llmstack_llm.structured_outputs import ConstraintAdmission, StructuredOutputsConfig
from llmstack_llm.tokenizer import Tokenizer
from llmstack_types import EngineCoreRequest, EngineReady, PoolingParams, SamplingParams

PromptInput = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with `prompt` or `prompt_token_ids` (with both, the text is only shown)."""

MAX_CHARS_ON_LOOP = 8192  # about 2 ms of tokenizing
_NO_NAMES: Mapping[str, str] = {}
_PLAIN_OUTPUTS = StructuredOutputsConfig()
# Fields that the front end alone heeds.
_DONE_HERE: Mapping[str, Any] = {"stream_interval": 1, "truncate_prompt_tokens": None, "truncation_side": "left"}
_NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, seed=0)


def draw_seed() -> int:
    """A seed nobody can guess."""
    return secrets.randbits(63)


class InputProcessor:
    """Tokenizes, admits, and makes engine requests.

    Attributes:
        limits: What admission allows; `set_ready` makes it what the running engine can take.
        eos_token_ids: The model's and the tokenizer's end-of-sequence ids.
        constraints: What compiles constraints on output.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        draw: Callable[[], int] = draw_seed,
        clock: Callable[[], float] = time.monotonic,
        structured_outputs: StructuredOutputsConfig = _PLAIN_OUTPUTS,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = AdmissionLimits(
            model_config.max_model_len,
            model_config.vocab_size,
            num_token_types=model_config.num_token_types,
            max_logprobs=model_config.max_logprobs,
        )
        self.eos_token_ids = _eos_token_ids(model_config, tokenizer)
        self.constraints = ConstraintAdmission(model_config.tokenizer_path, self.eos_token_ids, structured_outputs)
        self._start_token_id = _start_token_id(model_config, tokenizer)
        self._bad_words = BadWordSpelling(tokenizer)
        self._pooling_config = model_config.pooling
        self._draw = draw
        self._clock = clock

    def set_ready(self, ready: EngineReady) -> None:
        """Takes over the engine core's own limits."""
        self.limits = dataclasses.replace(
            self.limits,
            max_model_len=min(self.limits.max_model_len, ready.max_model_len),
            vocab_size=min(self.limits.vocab_size, ready.vocab_size),
            num_kv_tokens=ready.num_blocks * ready.block_size,
            embedding_size=ready.embedding_size,
            is_generative=ready.is_generative,
            is_causal=ready.is_causal,
            num_labels=ready.num_labels,
        )

    def admit(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        *,
        param: str = "prompt",
        param_names: Mapping[str, str] = _NO_NAMES,
        default_max_tokens: int | None = None,
        is_echo: bool = False,
        add_special_tokens: bool = True,
        compiles_constraint: bool = True,
    ) -> AdmittedRequest:
        """Tokenizes and checks one prompt; see `admit_request` for the arguments.

        `compiles_constraint`: False leaves that to the caller.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        text, token_ids = self._text_and_ids(prompt, param)
        if sampling_params.truncate_prompt_tokens is not None:
            text, token_ids = self._cut(text, token_ids, sampling_params, param, param_names, add_special_tokens)
        if token_ids is None:
            token_ids = self._encode(text or "", param, add_special_tokens)
        if sampling_params.stop_strings and self.tokenizer is None:
            raise request_errors.unsupported_value("stop", "stop strings need a tokenizer")
        admitted = admit_request(
            text,
            token_ids,
            sampling_params,
            self.limits,
            param=param,
            param_names=param_names,
            default_max_tokens=default_max_tokens,
            is_echo=is_echo,
        )
        bad_words_name = param_names.get("bad_words", "bad_words")
        params = self._bad_words.apply(admitted.sampling_params, self.limits.vocab_size, bad_words_name)
        if compiles_constraint:
            params = self.constraints.check(params, self.limits.vocab_size, _name_of(param_names))
        return admitted if params is admitted.sampling_params else dataclasses.replace(admitted, sampling_params=params)

    async def admit_async(
        self, prompt: PromptInput, sampling_params: SamplingParams, **options: Any
    ) -> AdmittedRequest:
        """`admit` off the loop: in a thread where the text is long, constraints in a process of their own."""
        options["compiles_constraint"] = False
        if _num_chars(prompt) + num_chars_of_bad_words(sampling_params) > MAX_CHARS_ON_LOOP:
            admitted = await asyncio.to_thread(self.admit, prompt, sampling_params, **options)
        else:
            admitted = self.admit(prompt, sampling_params, **options)
        if admitted.sampling_params.structured_outputs is None:
            return admitted
        name = _name_of(options.get("param_names", _NO_NAMES))
        params = await self.constraints.check_async(admitted.sampling_params, self.limits.vocab_size, name)
        return dataclasses.replace(admitted, sampling_params=params)

    def admit_pooling(
        self,
        prompt: PromptInput | TextPair,
        pooling_params: PoolingParams,
        *,
        param: str = "prompt",
        param_names: Mapping[str, str] = _NO_NAMES,
        add_special_tokens: bool = True,
    ) -> AdmittedPooling:
        """Tokenizes, cuts and checks one prompt to pool; see `admit_pooling.admit_pooling` for the arguments.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        limits = self.limits
        field_name = param_names.get("truncate_prompt_tokens", "truncate_prompt_tokens")
        max_tokens = check_truncation(pooling_params, limits.max_request_tokens, param=field_name)
        side = pooling_params.truncation_side
        text, given = (None, None) if isinstance(prompt, TextPair) else self._text_and_ids(prompt, param)
        if given is not None:
            encoded = PoolingPrompt(cut_token_ids(given, max_tokens, side))
        elif max_tokens is None and text is not None:
            encoded = PoolingPrompt(self._encode(text, param, add_special_tokens))
        else:
            texts = prompt if isinstance(prompt, TextPair) else text or ""
            tokenizer = self._tokenizer_for(texts, param, is_cut=max_tokens is not None)
            encoded = encode_pooling_prompt(
                tokenizer, texts, add_special_tokens=add_special_tokens,
                max_tokens=max_tokens, side=side, param=field_name,
            )  # fmt: skip
        if encoded.second_text_start is not None and limits.num_token_types > 1:
            pooling_params = dataclasses.replace(pooling_params, second_text_start=encoded.second_text_start)
        return admit_pooling(
            text, encoded.token_ids, pooling_params, limits, self._pooling_config, param=param, param_names=param_names
        )

    async def admit_pooling_async(
        self, prompt: PromptInput | TextPair, pooling_params: PoolingParams, **options: Any
    ) -> AdmittedPooling:
        """`admit_pooling`, in a thread where the text is long, so that other streams go on."""
        if _num_chars(prompt) > MAX_CHARS_ON_LOOP:
            return await asyncio.to_thread(self.admit_pooling, prompt, pooling_params, **options)
        return self.admit_pooling(prompt, pooling_params, **options)

    def process_pooling(
        self, request_id: str, admitted: AdmittedPooling, *, priority: int = 0, cache_salt: str = ""
    ) -> EngineCoreRequest:
        """The engine request of a prompt to pool."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(admitted.prompt_token_ids),
            sampling_params=_NO_TOKENS,
            arrival_time_s=self._clock(),
            priority=priority,
            cache_salt=cache_salt,
            pooling_params=admitted.pooling_params,
        )

    def process_inputs(
        self,
        request_id: str,
        admitted: AdmittedRequest,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[EngineCoreRequest]:
        """One engine request per completion; several have ids `{index}_{request_id}` and are forks of the first."""
        params = admitted.sampling_params
        seed = params.seed if params.seed is not None else self._draw()
        arrival_time_s = self._clock()
        max_tokens = params.max_tokens or 1  # nothing to generate still takes a step that computes the prompt
        # Choosing the best takes the log-probabilities of all.
        logprobs = params.logprobs or 0 if params.num_generated > params.n else params.logprobs
        return [
            EngineCoreRequest(
                request_id=request_id if params.num_generated == 1 else f"{index}_{request_id}",
                prompt_token_ids=list(admitted.prompt_token_ids),  # in one process the engine core would share it
                sampling_params=dataclasses.replace(
                    params,
                    n=params.n if params.use_beam_search else 1,
                    best_of=None,
                    logprobs=logprobs,
                    seed=completion_seed(seed, index),
                    max_tokens=max_tokens,
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                    **_DONE_HERE,
                ),
                eos_token_ids=self.eos_token_ids,
                arrival_time_s=arrival_time_s,
                priority=priority,
                cache_salt=cache_salt,
                fork_of=f"0_{request_id}" if index else "",
            )
            for index in range(params.num_generated)
        ]

    def _cut(
        self,
        text: str | None,
        token_ids: list[int] | None,
        params: SamplingParams,
        param: str,
        param_names: Mapping[str, str],
        add_special_tokens: bool,
    ) -> tuple[str | None, list[int]]:
        """The part of a prompt that is kept, as text (where there is a tokenizer) and as token ids."""
        name = param_names.get("truncate_prompt_tokens", "truncate_prompt_tokens")
        max_tokens = check_truncation(params, self.limits.max_request_tokens, param=name)
        if params.truncate_prompt_tokens == -1 and type(params.max_tokens or 1) is int:
            max_tokens = max(1, self.limits.max_request_tokens - max(params.max_tokens or 1, 1))
        if token_ids is not None:
            kept = cut_token_ids(token_ids, max_tokens, params.truncation_side)
        elif self.tokenizer is None:
            raise request_errors.unsupported_value(param, "this server has no tokenizer, so it takes token ids only")
        else:
            check_text(param, text or "")
            kept = encode_pooling_prompt(
                self.tokenizer,
                text or "",
                add_special_tokens=add_special_tokens,
                max_tokens=max_tokens,
                side=params.truncation_side,
                param=name,
            ).token_ids
        return None if self.tokenizer is None else self.tokenizer.decode(kept), kept

    def _text_and_ids(self, prompt: PromptInput, param: str) -> tuple[str | None, list[int] | None]:
        if isinstance(prompt, str):
            return prompt, None
        if isinstance(prompt, Mapping):
            return _from_mapping(prompt, param)
        if isinstance(prompt, list | tuple):
            return None, list(prompt)
        raise request_errors.invalid_type(param, "a string or an array of token ids", prompt)

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._tokenizer_for(text, param)
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids and self._start_token_id is not None:
            return [self._start_token_id]  # an empty prompt starts a text, as at OpenAI
        return token_ids

    def _tokenizer_for(self, text: str | TextPair, param: str, *, is_cut: bool = False) -> Tokenizer:
        """The tokenizer, once the text is known to be one that it can take; `is_cut` says that any length will do."""
        if self.tokenizer is None:
            raise request_errors.unsupported_value(param, "this server has no tokenizer, so it takes token ids only")
        for part in (text.first, text.second) if isinstance(text, TextPair) else (text,):
            check_text(param, part)
            if len(part) > MAX_CHARS_ON_LOOP and not is_cut:  # below that, tokenizing costs less than the bound
                check_prompt_chars(part, self.limits, self.tokenizer.max_chars_per_token, param=param)
        return self.tokenizer


def _from_mapping(prompt: Mapping[str, Any], param: str) -> tuple[str | None, list[int] | None]:
    for key in prompt:
        if key not in ("prompt", "prompt_token_ids"):
            raise request_errors.unsupported_parameter(request_errors.echo(key), f"'{request_errors.echo(key)}'")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise request_errors.invalid_type(param, "a string", text)
    if token_ids is None and text is None:
        raise request_errors.invalid_type(param, "a string or an array of token ids", None)
    if token_ids is not None and not isinstance(token_ids, list | tuple):
        raise request_errors.invalid_type(param, "an array of token ids", token_ids)
    return text, None if token_ids is None else list(token_ids)


def _num_chars(prompt: PromptInput | TextPair) -> int:
    if isinstance(prompt, TextPair):
        return len(prompt.first) + len(prompt.second)
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
    return len(prompt) if isinstance(prompt, str) else 0


def _name_of(param_names: Mapping[str, str]) -> Callable[[str], str]:
    return lambda field: param_names.get(field, field)


def _eos_token_ids(model_config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    eos_token_id = None if tokenizer is None else tokenizer.eos_token_id
    found = (*model_config.eos_token_ids, *(() if eos_token_id is None else (eos_token_id,)))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id < model_config.vocab_size))


def _start_token_id(model_config: ModelConfig, tokenizer: Tokenizer | None) -> int | None:
    named = () if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    found = (*named, model_config.bos_token_id, *model_config.eos_token_ids)
    return next((token_id for token_id in found if token_id is not None), None)
