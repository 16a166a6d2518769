"""Offline use: a list of prompts in, a list of outputs in the same order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, Unpack

from llmstack_llm import request_errors
from llmstack_llm.adapters import LoRARequests
from llmstack_llm.admission.rules import check_sleep_level
from llmstack_llm.admission.sampling import CheckedSampling, GivenSampling, check_sampling, given_fields
from llmstack_llm.chat.renderers import ChatRenderers
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.chat.template_files import find_chat_template
from llmstack_llm.engine_args import EngineArgs, EngineArgsError
from llmstack_llm.offline.beam_search import PARAM_NAMES as BEAM_PARAM_NAMES
from llmstack_llm.offline.beam_search import BeamSearchOutput, BeamSearchParams, to_beam_search_output
from llmstack_llm.offline.keywords import own_options, served_name
from llmstack_llm.offline.llm_engine import LLMEngine
from llmstack_llm.offline.media import conversation_list
from llmstack_llm.offline.pooling import OfflinePooling
from llmstack_llm.offline.requests import OfflineRequests, UseTqdm, one_each, priority_list, prompt_list, without_note
from llmstack_llm.offline.tokenizer import OfflineTokenizer
from llmstack_llm.outputs.metrics import Metric, MetricsKeeper
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.outputs.stats import StatLogger
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.outputs import PoolingRequestOutput
from llmstack_llm.requests import AdmittedRequest, ChatPrompt, PromptInput, RenderedPrompt
from llmstack_types import InvalidRequestError, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from llmstack_engine_core.protocols import EventHook
    from llmstack_llm.model.config import ModelConfig

Message = Mapping[str, Any]
DEFAULT_MAX_TOKENS = 16

# Methods of vLLM's `LLM` that are not there, and why.
_NOT_OFFERED: Mapping[str, str] = {
    "collective_rpc": "there is one worker, in the engine core: nothing runs code that callers send",
    "apply_model": "the model lives with its runner, which runs no code that callers send",
    "set_tokenizer": "constraints and templates follow it from the start: use LLM(..., tokenizer=FOLDER)",
    "reward": "use encode(prompts, pooling_task=...)",
}


class RenderOptions(TypedDict, total=False):
    """How `LLM.chat` renders a conversation.

    Attributes:
        chat_template: A path or the template itself, in place of the model's.
        chat_template_content_format: Whether it gets a message's content as `string` or in `openai`'s parts; `auto`
            asks the template.
        add_generation_prompt: Whether the prompt ends where an assistant's message begins; the default.
        continue_final_message: Whether the answer continues the last message instead.
        tools: Functions that the template shows to the model.
        chat_template_kwargs: Further variables of the template.
    """

    chat_template: str | None
    chat_template_content_format: str
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


_SLEEPING_PARTS = frozenset({"weights", "kv_cache"})


class LLM(OfflinePooling):
    """One model for offline work. A context manager; `close` gives everything back.

    The engine core runs in this process, where a debugger can reach it, unless `multiprocess` is set.

    `model`: A folder, or a repository id.
    `event_hooks`: Receive the states of requests and every step (`llmstack_engine_core.EventHook`).
    `engine_kwargs`: Options of `EngineArgs`, such as `dtype`, `max_model_len` and `gpu_memory_utilization`.

    Raises:
        EngineArgsError, ModelConfigError, ModelFilesError, TokenizerError, EngineStartError: The text says why.
    """

    def __init__(
        self,
        model: str,
        *,
        multiprocess: bool = False,
        stat_loggers: Sequence[StatLogger] = (),
        event_hooks: Sequence[EventHook] = (),
        **engine_kwargs: Any,
    ) -> None:
        name = served_name(engine_kwargs) or model
        engine_kwargs = own_options(engine_kwargs)
        engine_kwargs.setdefault("trace", os.environ.get("LLMSTACK_TRACE", "") not in ("", "0"))
        args = EngineArgs(model, **engine_kwargs)
        self._metrics = MetricsKeeper(name)
        stat_loggers = [self._metrics, *stat_loggers]
        self.llm_engine = LLMEngine.from_engine_args(
            args, multiprocess=multiprocess, stat_loggers=stat_loggers, event_hooks=event_hooks
        )
        self.llm_engine.renderer = weakref.WeakMethod(self._render_all)
        self._requests = OfflineRequests(self.llm_engine)
        self._awake_parts = _SLEEPING_PARTS

    @property
    def model_config(self) -> ModelConfig:
        """The facts of the model, such as `max_model_len`."""
        return self.llm_engine.model_config

    def __getattr__(self, name: str) -> NoReturn:
        """Says why a method of vLLM's is not there; `hasattr` stays false."""
        reason = f": {_NOT_OFFERED[name]}" if name in _NOT_OFFERED else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{reason}", name=name, obj=self)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs are in the prompts' order.

        `prompts`: One or many: text, token ids, or dicts with `prompt` or `prompt_token_ids`. Beside a `prompt` that
          spells the placeholder of each, `multi_modal_data` has pictures: `{"image": one or a list}`.
        `sampling_params`: One for all, or one each; None takes the model's defaults. A default `max_tokens`
          is cut to what the context has left.
        `use_tqdm`: Shows a progress bar, or what makes one.
        `lora_request`: A `LoRARequest` for all, or one or None for each; needs `enable_lora=True`.
        `priority`: One per prompt, lower ones first, under `scheduling_policy="priority"`.

        Raises:
            InvalidRequestError: A prompt or its parameters are wrong; nothing is computed then.
        """
        admitted = self._admit_all(prompts, sampling_params, lora_request)
        return self._complete(admitted, use_tqdm, priority_list(priority, len(admitted)))

    def enqueue(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queues prompts as `generate` takes them, for `wait_for_completion`; the ids of their requests.

        Raises:
            InvalidRequestError: A prompt or its parameters are wrong; nothing is queued then.
        """
        admitted = self._admit_all(prompts, sampling_params, lora_request)
        return self._requests.enqueue(admitted, priority_list(priority, len(admitted)))

    def wait_for_completion(self, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Computes what is queued; the outputs are in the order in which it was queued."""
        return [output for output in self._requests.wait(use_tqdm) if isinstance(output, RequestOutput)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        **options: Unpack[RenderOptions],
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of many; `options` are those of `RenderOptions`.

        Raises:
            InvalidRequestError: A conversation or its parameters are wrong; nothing is computed then.
        """
        prompts = self._render_all(messages, **options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        **options: Unpack[RenderOptions],
    ) -> list[str]:
        """Queues conversations as `chat` takes them, for `wait_for_completion`; the ids of their requests.

        Raises:
            InvalidRequestError: A conversation or its parameters are wrong; nothing is queued then.
        """
        prompts = self._render_all(messages, **options)
        return self.enqueue(prompts, sampling_params, lora_request=lora_request, priority=priority)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first; the outputs are in the prompts' order.

        `lora_request`: As for `generate`.

        Raises:
            InvalidRequestError: A prompt or its parameters are wrong; nothing is computed then.
        """
        engine, admit = self.llm_engine, self.llm_engine.input_processor.admit
        sampling = engine.input_processor.check_sampling(GivenSampling(params.to_fields(), BEAM_PARAM_NAMES))
        all_prompts = prompt_list(prompts)
        adapters = engine.resolve_adapters(lora_request, len(all_prompts))
        admitted = [
            engine.adapters.adapted(admit(prompt, sampling, param=f"prompts[{index}]"), adapter)
            for index, (prompt, adapter) in enumerate(zip(self._read(all_prompts), adapters, strict=True))
        ]
        outputs = self._complete(admitted, use_tqdm)
        return [to_beam_search_output(output, self._prompt_text(output)) for output in outputs]

    def get_tokenizer(self) -> OfflineTokenizer:
        """The tokenizer; raises InvalidRequestError where there is none."""
        if self.llm_engine.tokenizer is None:
            raise request_errors.unsupported_value("prompt", "there is no tokenizer (skip_tokenizer_init)")
        return OfflineTokenizer(self.llm_engine.tokenizer, self._render_all)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (`generation_config.json`) over vLLM's."""
        params = self.llm_engine.model_config.default_sampling_params()
        return params if params.max_tokens is not None else dataclasses.replace(params, max_tokens=DEFAULT_MAX_TOKENS)

    def get_metrics(self) -> list[Metric]:
        """The metrics so far: `Counter`s, `Gauge`s and `Vector`s of `llmstack_llm.outputs.metrics`."""
        return self._metrics.metrics()

    def sleep(self, level: int = 1) -> bool:
        """Gives memory back until `wake_up`: of the KV cache, and with level 2 of the weights too.

        Returns False, and does nothing, while requests are running. Cached prefixes are forgotten.

        Raises:
            InvalidRequestError: There is no such level.
        """
        level = check_sleep_level(level)
        is_asleep = self.llm_engine.sleep(level)
        if is_asleep:  # level 1 keeps the weights
            self._awake_parts = frozenset({"weights"} if level == 1 else ())
        return is_asleep

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates and loads again what `sleep` gave back.

        `tags`: The parts to load, `weights` or `kv_cache`; None for both. Parts that are named one after the other are
          loaded with the last one.
        """
        named = _SLEEPING_PARTS if tags is None else frozenset(tags)
        if not named <= _SLEEPING_PARTS:
            raise EngineArgsError(f"tags: expected {' or '.join(sorted(_SLEEPING_PARTS))}")
        self._awake_parts |= named
        if self._awake_parts == _SLEEPING_PARTS:
            self.llm_engine.wake_up()

    def start_profile(self) -> None:
        """Begins to record what the model runner computes; needs `profiler_config`."""
        problem = self.llm_engine.start_profile()
        if problem:
            raise EngineArgsError(problem)

    def stop_profile(self) -> list[str]:
        """Ends the profile; the traces written since the last call."""
        return self.llm_engine.stop_profile()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self.llm_engine.reset_prefix_cache()

    def close(self) -> None:
        """Stops the engine core. Idempotent."""
        engine = getattr(self, "llm_engine", None)
        if engine is not None:
            engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At the end of the interpreter modules may be partly gone, and an error cannot be handled.
        with contextlib.suppress(Exception):
            self.close()

    def _template(self, chat_template: str | None) -> ChatTemplate:
        if chat_template is None:
            return self.llm_engine.chat_template
        return ChatTemplate(find_chat_template(None, {}, override=chat_template), self.get_tokenizer().named_tokens)

    def _render_all(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RenderedPrompt]:
        """The conversations as prompts; see `RenderOptions`."""
        renderers = ChatRenderers(
            self._template(chat_template),
            self.get_tokenizer(),
            content_format=chat_template_content_format,
            check_length=self.llm_engine.input_processor.check_length,
        )
        return [
            self.llm_engine.media.render(
                renderers,
                ChatPrompt(
                    conversation,
                    add_generation_prompt,
                    continue_final_message,
                    tools,
                    template_kwargs=chat_template_kwargs,
                ),
            )
            for conversation in conversation_list(messages)
        ]

    def _prompt_text(self, output: RequestOutput) -> str | None:
        if output.prompt is not None or self.llm_engine.tokenizer is None:
            return output.prompt
        return self.llm_engine.tokenizer.decode(output.prompt_token_ids)

    def _params_list(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if params is None else params
        return one_each("sampling_params", given, SamplingParams, num_prompts, "sampling parameters")

    def _admit_all(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
    ) -> list[AdmittedRequest]:
        engine = self.llm_engine
        all_prompts = prompt_list(prompts)
        adapters = engine.resolve_adapters(lora_request, len(all_prompts))
        params = self._params_list(sampling_params, len(all_prompts))
        checked: dict[int, tuple[CheckedSampling, int | None]] = {}  # once each: prompts often share parameters
        for one in params:
            if id(one) not in checked:
                checked[id(one)] = self._check(one)
        admit, all_prompts = engine.input_processor.admit, self._read(all_prompts)
        return [
            engine.adapters.adapted(
                admit(prompt, sampling, param=f"prompts[{index}]", default_max_tokens=default_max_tokens), adapter
            )
            for index, (prompt, (sampling, default_max_tokens), adapter) in enumerate(
                zip(all_prompts, (checked[id(one)] for one in params), adapters, strict=True)
            )
        ]

    def _read(self, prompts: Sequence[PromptInput]) -> list[PromptInput]:
        media, tokenizer = self.llm_engine.media, self.llm_engine.tokenizer
        return [media.read(one, tokenizer, f"prompts[{index}]") for index, one in enumerate(prompts)]

    def _check(self, params: SamplingParams) -> tuple[CheckedSampling, int | None]:
        """Checked parameters whose outputs come at the end, and their `max_tokens` where that is the default."""
        is_default = params.max_tokens == DEFAULT_MAX_TOKENS
        given = given_fields(params) | {"output_kind": RequestOutputKind.FINAL_ONLY}
        if is_default:
            given["max_tokens"] = None
        processor = self.llm_engine.input_processor
        try:
            return check_sampling(given, processor.limits), DEFAULT_MAX_TOKENS if is_default else None
        except InvalidRequestError as error:
            raise without_note(error) from error

    def _complete(
        self, admitted: Sequence[AdmittedRequest], use_tqdm: UseTqdm, priorities: Sequence[int] | None = None
    ) -> list[RequestOutput]:
        outputs = self._requests.run(admitted, priorities or [0] * len(admitted), use_tqdm)
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def _run_pooling(self, admitted: Sequence[AdmittedPooling], use_tqdm: UseTqdm) -> list[PoolingRequestOutput]:
        outputs = self._requests.run(admitted, [0] * len(admitted), use_tqdm)
        return [output for output in outputs if isinstance(output, PoolingRequestOutput)]
