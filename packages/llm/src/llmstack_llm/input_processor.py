"""Conversion of prompts and sampling fields to requests of the engine core."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission import rules
from llmstack_llm.admission.beams import of_prompt, with_beam_defaults
from llmstack_llm.admission.contradictions import forbid
from llmstack_llm.admission.control_fields import check_control_fields
from llmstack_llm.admission.limits import check_prompt_chars, limits_of, limits_with
from llmstack_llm.admission.prompt_embeds import read_prompt_embeds
from llmstack_llm.admission.sampling import (
    NO_NAMES,
    CheckedSampling,
    GivenSampling,
    check_sampling,
    given_fields,
    resolve_max_tokens,
)
from llmstack_llm.admission.seeds import draw_seed
from llmstack_llm.admission.structured_outputs import ConstraintAdmission, StructuredOutputsConfig
from llmstack_llm.fan_out import fan_out
from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media.source import FORCED
from llmstack_llm.media_door import MediaDoor
from llmstack_llm.model.boundary_ids import eos_token_ids, start_token_id
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.pooling.admission import AdmittedPooling, admit_pooling
from llmstack_llm.pooling.prompt import (
    PoolingPrompt,
    TextPair,
    cut_token_ids,
    encode_pooling_prompt,
    is_limited,
    num_chars_of,
)
from llmstack_llm.requests import (
    AdmittedRequest,
    GenerationRequest,
    PromptInput,
    RenderedPrompt,
    RequestDraft,
    text_and_ids_of,
)
from llmstack_llm.text.bad_words import BadWordSpelling, num_chars_of_bad_words
from llmstack_llm.text.gate import TextGate
from llmstack_llm.text.tokenizer import MAX_CHARS_ON_LOOP, Tokenizer
from llmstack_types import (
    EngineCoreRequest,
    EngineReady,
    InvalidRequestError,
    MediaItem,
    PoolingParams,
    SamplingParams,
)

_PLAIN_OUTPUTS = StructuredOutputsConfig()
_DONE = frozenset({"truncate_prompt_tokens", "truncation_side", FORCED})  # nothing that the engine core reads
_NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, seed=0)


class InputProcessor:
    """Tokenizes, admits, and makes engine requests.

    Attributes:
        limits: The limits of admission; `set_ready` sets them to those of the running engine.
        eos_token_ids: The model's and the tokenizer's end-of-sequence ids.
        constraints: The compiler of constraints on output.
        gate: Where long texts wait for a thread.
        media: Where pictures and the like come in.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        draw: Callable[[], int] = draw_seed,
        clock: Callable[[], float] = time.monotonic,
        structured_outputs: StructuredOutputsConfig = _PLAIN_OUTPUTS,
        media: MediaOptions | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.gate = TextGate()
        self.media = MediaDoor(model_config.path, media)
        self.limits = limits_of(model_config)
        self.eos_token_ids = eos_token_ids(model_config, tokenizer)
        self.constraints = ConstraintAdmission(model_config.tokenizer_path, self.eos_token_ids, structured_outputs)
        self._start_token_id = start_token_id(model_config, tokenizer)
        self._bad_words = BadWordSpelling(tokenizer)
        self._pooling_config = model_config.pooling
        self._default_sampling: Mapping[str, object] = model_config.default_sampling
        self._beam_defaults = model_config.beam_defaults
        self._has_good_defaults = False
        self._check_defaults()
        self._draw = draw
        self._clock = clock

    def set_model(self, model_config: ModelConfig, ready: EngineReady, running: Callable[[], Collection[str]]) -> None:
        """Applies the limits and defaults of another model with the same tokenizer and use.

        `running`: The ids of the requests that have not ended, now and later.
        """
        self.limits = limits_of(model_config)
        self._default_sampling, self._beam_defaults = model_config.default_sampling, model_config.beam_defaults
        self.media.set_model(model_config.path, running)
        self.set_ready(ready)

    def set_ready(self, ready: EngineReady) -> None:
        """Applies the engine core's limits.

        Raises:
            EngineStartError: The model takes pictures, and they cannot be prepared.
        """
        self.media.set_ready(ready)
        placeholders = self.media.placeholders(self.tokenizer)
        has_bytes = self.tokenizer is not None and self.tokenizer.token_bytes is not None
        limits = limits_with(self.limits, ready)
        self.limits = dataclasses.replace(limits, placeholders=placeholders, has_token_bytes=has_bytes)
        self._check_defaults()

    def _check_defaults(self) -> None:
        """Checks the model's defaults once; a bad one is an error of the requests that do not override it."""
        if self.limits.is_generative:
            try:
                self._default_sampling = check_sampling(self._default_sampling, self.limits).values
            except InvalidRequestError:
                self._has_good_defaults = False
            else:
                self._has_good_defaults = True

    def check_sampling(self, sampling: GivenSampling | CheckedSampling) -> CheckedSampling:
        """Checks the sampling fields of a request, over the model's defaults; see `sampling.check_sampling`.

        Fields that are checked already do not pass again. A beam search has defaults of its own.

        Raises:
            InvalidRequestError: Names the first field at fault.
        """
        if isinstance(sampling, CheckedSampling):
            return sampling
        given, defaults = sampling.values, self._default_sampling
        if given.get("use_beam_search"):
            given, defaults = with_beam_defaults(given, defaults, self._beam_defaults, sampling.names), {}
        if not self._has_good_defaults:
            given, defaults = {**defaults, **given}, {}
        return check_sampling(given, self.limits, sampling.names, is_echo=sampling.is_echo, defaults=defaults)

    def check_params(
        self, params: SamplingParams, names: Mapping[str, str] = NO_NAMES, *, is_echo: bool = False
    ) -> CheckedSampling:
        """`check_sampling` for parameters of vLLM's class, which replace the model's defaults."""
        return check_sampling(given_fields(params), self.limits, names, is_echo=is_echo)

    def admit(
        self,
        prompt: PromptInput,
        sampling: CheckedSampling,
        *,
        param: str = "prompt",
        default_max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> AdmittedRequest:
        """Tokenizes one prompt and checks what depends on it; the fields are those of `GenerationRequest`.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        draft = self._tokenized(prompt, sampling, param, default_max_tokens, add_special_tokens)
        constraint = draft.values.get("structured_outputs")
        if constraint is not None:
            checked = self.constraints.check(constraint, self.limits.vocab_size, sampling.names)
            draft.values["structured_outputs"] = checked
        return draft.finish()

    async def admit_async(self, request: GenerationRequest, sampling: CheckedSampling) -> AdmittedRequest:
        """`admit` off the event loop: in a thread where the text is long, constraints in a separate process."""
        arguments = (request.prompt, sampling, request.param, request.default_max_tokens, request.add_special_tokens)
        words = sampling.values.get("bad_words")  # a rendered prompt is tokenized already
        num_chars = 0 if isinstance(request.prompt, RenderedPrompt) else num_chars_of(request.prompt)
        if words:
            num_chars += num_chars_of_bad_words(words)
        draft = await self.gate.run(num_chars, self._tokenized, *arguments)
        constraint = draft.values.get("structured_outputs")
        if constraint is not None:
            vocab_size, names = self.limits.vocab_size, sampling.names
            checked = await self.constraints.check_async(constraint, vocab_size, names, request.tenant)
            draft.values["structured_outputs"] = checked
        return draft.finish()

    def admit_pooling(
        self,
        prompt: PromptInput | TextPair,
        pooling_params: PoolingParams,
        *,
        param: str = "prompt",
        param_names: Mapping[str, str] = NO_NAMES,
        add_special_tokens: bool = True,
    ) -> AdmittedPooling:
        """Tokenizes, cuts and checks one prompt to pool; see `admit_pooling.admit_pooling` for the arguments.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        if not isinstance(pooling_params, PoolingParams):
            raise request_errors.invalid_type("pooling_params", "PoolingParams", pooling_params)
        limits, field_name = self.limits, param_names.get("truncate_prompt_tokens", "truncate_prompt_tokens")
        rules.check_truncation_side("truncation_side", pooling_params.truncation_side)
        max_tokens = rules.check_truncation(
            field_name, pooling_params.truncate_prompt_tokens, limits.max_request_tokens
        )
        side = pooling_params.truncation_side
        text, given = (None, None) if isinstance(prompt, TextPair) else self._text_and_ids(prompt, param)
        if given is not None:
            encoded = PoolingPrompt(cut_token_ids(given, max_tokens, side))
        elif max_tokens is None and text is not None and not is_limited(text):
            encoded = PoolingPrompt(self._encode(text, param, add_special_tokens))
        else:
            texts = prompt if isinstance(prompt, TextPair) else text or ""
            tokenizer = self._tokenizer_for(texts, param, is_cut=max_tokens is not None or is_limited(texts))
            encoded = encode_pooling_prompt(
                tokenizer, texts, add_special_tokens=add_special_tokens,
                max_tokens=max_tokens, side=side, param=field_name,
            )  # fmt: skip
        if encoded.second_text_start is not None and limits.num_token_types > 1:
            pooling_params = dataclasses.replace(pooling_params, second_text_start=encoded.second_text_start)
        placed = self.media.placed(prompt, param, is_cut=max_tokens is not None)
        return admit_pooling(
            text, encoded.token_ids, pooling_params, limits, self._pooling_config,
            param=param, param_names=param_names, placed=placed,
        )  # fmt: skip

    async def admit_pooling_async(
        self, prompt: PromptInput | TextPair, pooling_params: PoolingParams, **options: Any
    ) -> AdmittedPooling:
        """`admit_pooling`, in a thread where the text is long, so that other streams go on."""
        return await self.gate.run(num_chars_of(prompt), lambda: self.admit_pooling(prompt, pooling_params, **options))

    async def tokenize(self, text: str, param: str, **options: bool) -> list[int]:
        """Token ids of a text alone; raises as `check_length`. `options`: Those of `Tokenizer.encode`."""
        return await self.gate.run(len(text), lambda: self._tokenizer_for(text, param).encode(text, **options))

    def check_length(self, num_chars: int, param: str, *, is_cut: bool = False) -> None:
        """Refuses a text that is too long to be tokenized; see `limits.max_prompt_chars`.

        Raises:
            InvalidRequestError: Code `context_length_exceeded`.
        """
        # Below that, tokenizing costs less than the bound.
        if self.tokenizer is not None and num_chars > MAX_CHARS_ON_LOOP:
            longest = self.tokenizer.max_chars_per_token
            check_prompt_chars(num_chars, self.limits, longest, param=param, is_cut=is_cut)

    def process_pooling(
        self, request_id: str, admitted: AdmittedPooling, *, priority: int = 0, cache_salt: str = "", tenant: str = ""
    ) -> EngineCoreRequest:
        """The engine request of a prompt to pool; the id and the fields are checked."""
        check_control_fields(request_id, priority=priority, cache_salt=cache_salt, tenant=tenant)
        return EngineCoreRequest(
            request_id, list(admitted.prompt_token_ids), _NO_TOKENS, arrival_time_s=self._clock(), priority=priority,
            cache_salt=cache_salt, pooling_params=admitted.pooling_params, tenant=tenant, media=admitted.media,
            **admitted.adapter_fields(),
        )  # fmt: skip

    def process_inputs(self, request_id: str, admitted: AdmittedRequest, **fields: Any) -> list[EngineCoreRequest]:
        """The request's completions, one engine request each; `fields` are further fields, checked as the id is.

        Several have the ids `{index}_{request_id}` and are forks of the first.
        """
        check_control_fields(request_id, **fields)
        params = admitted.sampling_params
        first = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(admitted.prompt_token_ids),  # in one process the engine core would share it
            sampling_params=params,
            eos_token_ids=self.eos_token_ids,
            arrival_time_s=self._clock(),
            media=admitted.media,
            **fields,
        )
        if params.n == 1 and params.best_of in (None, 1) and params.max_tokens:
            return [first]
        return fan_out(first)

    def _tokenized(
        self,
        prompt: PromptInput,
        sampling: CheckedSampling,
        param: str,
        default_max_tokens: int | None,
        add_special_tokens: bool,
    ) -> RequestDraft:
        """The prompt's tokens, and the sampling fields with all that depends on the prompt and the tokenizer."""
        values = sampling.values
        if values.get("stop") and self.tokenizer is None:
            raise request_errors.unsupported_value("stop", "stop strings need a tokenizer")
        if values.get("thinking_token_budget") is not None and values.get("thinking_tags") is None:
            name = sampling.names.get("thinking_token_budget", "thinking_token_budget")
            raise request_errors.unsupported_value(
                name, "what ends this model's reasoning is not known here (--reasoning-parser)"
            )
        embeds = read_prompt_embeds(prompt, sampling, self.limits) if isinstance(prompt, Mapping) else None
        text, token_ids = self._text_and_ids(prompt, param) if embeds is None else (embeds.text, embeds.token_ids)
        if is_cut := values.get("truncate_prompt_tokens") is not None:
            text, token_ids = self._cut(text, token_ids, sampling, param, add_special_tokens)
        if token_ids is None:
            token_ids = self._encode(text or "", param, add_special_tokens)
        # A longer prompt is refused below, whatever the others are.
        rules.check_token_ids(param, token_ids, self.limits.vocab_size, num_checked=self.limits.max_prompt_tokens)
        if not token_ids:
            raise request_errors.empty_array(param)
        source_media: tuple[MediaItem, ...] = ()
        if self.media.source is not None or sampling.values.get(FORCED) is not None:
            token_ids, source_media = self.media.of_decoder(token_ids, sampling, param, self.limits)
        has_media = self.media.speech is not None or (isinstance(prompt, RenderedPrompt) and prompt.media)
        placed = self.media.placed(prompt, param, is_cut=is_cut) if has_media else ()
        if self.limits.placeholders and embeds is None and not placed:
            rules.check_placeholders(param, token_ids, self.limits.placeholders)
        max_tokens = resolve_max_tokens(
            sampling, len(token_ids), self.limits, param=param, default_max_tokens=default_max_tokens
        )
        kept = {name: value for name, value in values.items() if name not in _DONE}
        kept |= {"max_tokens": max_tokens, "seed": self._draw() if values.get("seed") is None else values["seed"]}
        if values.get("use_beam_search"):
            kept |= of_prompt(values, self._beam_defaults, token_ids, max_tokens, has_source=bool(source_media))
        draft = RequestDraft(param, text, token_ids, kept, source_media if embeds is None else embeds.media, placed)
        if values.get("bad_words") or values.get("allowed_token_ids"):
            forbid(draft.values, sampling.names, self._bad_words, self.limits.vocab_size, self.eos_token_ids)
        return draft

    def _cut(
        self,
        text: str | None,
        token_ids: list[int] | None,
        sampling: CheckedSampling,
        param: str,
        add_special_tokens: bool,
    ) -> tuple[str | None, list[int]]:
        """The part of a prompt that is kept, as text (where there is a tokenizer) and as token ids."""
        values, name = sampling.values, sampling.names.get("truncate_prompt_tokens", "truncate_prompt_tokens")
        max_tokens, side = values["truncate_prompt_tokens"], values.get("truncation_side", "left")
        if max_tokens == -1:
            room = max(1, self.limits.max_request_tokens - max(values.get("max_tokens") or 1, 1))
            max_tokens = self.limits.max_source_tokens or room
        if token_ids is not None:
            kept = cut_token_ids(token_ids, max_tokens, side)
        else:
            tokenizer = self._tokenizer_for(text or "", param, is_cut=True)
            kept = encode_pooling_prompt(
                tokenizer, text or "", add_special_tokens=add_special_tokens,
                max_tokens=max_tokens, side=side, param=name,
            ).token_ids  # fmt: skip
        return None if self.tokenizer is None else self.tokenizer.decode(kept), kept

    def _text_and_ids(self, prompt: PromptInput, param: str) -> tuple[str | None, list[int] | None]:
        if isinstance(prompt, str):
            return prompt, None
        if isinstance(prompt, RenderedPrompt):
            return prompt.text, prompt.token_ids
        if isinstance(prompt, Mapping):
            return text_and_ids_of(prompt, param)
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
        """The tokenizer, once the text is known to be one that it can take; `is_cut` says that its tokens are cut."""
        if self.tokenizer is None:
            raise request_errors.unsupported_value(param, "this server has no tokenizer, so it takes token ids only")
        for part in (text.first, text.second) if isinstance(text, TextPair) else (text,):
            rules.check_text(param, part)
        self.check_length(num_chars_of(text), param, is_cut=is_cut)
        return self.tokenizer
