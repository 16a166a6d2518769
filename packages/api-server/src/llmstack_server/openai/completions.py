"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from llmstack_llm.admit import admit_sampling_params, check_fan_out
from llmstack_server.openai.common import Generation, answer_ids, check_fields
from llmstack_server.openai.events import close
from llmstack_server.openai.logprobs import CompletionLogprobs, Position, prompt_logprobs_object
from llmstack_server.openai.models import check_model
from llmstack_server.openai.protocol import CompletionRequest, parse
from llmstack_server.openai.sampling import param_names, parse_prompts, sampling_params
from llmstack_server.openai.unsupported import COMPLETIONS
from llmstack_server.protocols import AdmittedPrompt, Completion, PromptOutput
from llmstack_server.state import ServerState
from llmstack_types import SamplingParams

DEFAULT_MAX_TOKENS = 16


async def prepare_completion(state: ServerState, body: dict[str, Any]) -> CompletionAnswer:
    """Checks a request and tokenizes its prompts.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    fields = parse(CompletionRequest, body)
    values, is_list = parse_prompts(fields.prompt, body)
    check_fields(state, body, fields, COMPLETIONS)
    names = param_names(fields)
    ids = answer_ids("cmpl", fields.request_id)
    params = admit_sampling_params(_params(state, fields), state.limits, param_names=names, is_echo=bool(fields.echo))
    check_fan_out(len(values), params.num_generated, state.limits)
    prompts = [
        await state.engine.admit(
            value,
            params,
            param=f"prompt[{index}]" if is_list else "prompt",
            param_names=names,
            is_echo=bool(fields.echo),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            add_special_tokens=fields.add_special_tokens is not False,
        )
        for index, value in enumerate(values)
    ]
    generation = Generation(state, fields, check_model(state, fields.model), prompts, ids)
    has_logprobs = fields.logprobs is not None
    echoes = [await _echo(state, prompt, has_logprobs) for prompt in prompts] if fields.echo else []
    return CompletionAnswer(generation, fields, echoes)


def _params(state: ServerState, fields: CompletionRequest) -> SamplingParams:
    params = sampling_params(fields, state.engine.default_sampling_params(), logprobs=fields.logprobs)
    if fields.echo and fields.logprobs is not None and params.prompt_logprobs is None:
        # With `echo` the log-probabilities cover the prompt as well.
        return replace(params, prompt_logprobs=fields.logprobs)
    return params


class Echo:
    """A prompt as the answer repeats it, for all of its choices.

    Attributes:
        token_texts: One per token; empty unless log-probabilities are asked for.
        positions: The prompt's log-probabilities; they come once, with the first output.
    """

    def __init__(self, text: str, token_texts: Sequence[str]) -> None:
        self.text = text
        self.token_texts = token_texts
        self.positions: Sequence[Position | None] = [None] * len(token_texts)

    def note(self, output: PromptOutput) -> None:
        """Keeps what an output says about the prompt."""
        if output.prompt_logprobs is not None:
            self.positions = output.prompt_logprobs


async def _echo(state: ServerState, prompt: AdmittedPrompt, has_logprobs: bool) -> Echo:
    tokenizer = await state.engine.get_tokenizer("echo")
    token_ids = prompt.prompt_token_ids
    text = prompt.prompt
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
    return Echo(text, [tokenizer.text_of(token_id) for token_id in token_ids] if has_logprobs else ())


class _ChoiceBuilder:
    """Builds the choices of one completion; remembers what its earlier chunks have brought."""

    def __init__(self, fields: CompletionRequest, echo: Echo | None, *, shows_ids: bool) -> None:
        self._fields = fields
        self._echo = echo
        self._is_first = True
        self._logprobs = None if fields.logprobs is None else CompletionLogprobs(fields.logprobs, shows_ids=shows_ids)

    def build(self, index: int, output: PromptOutput, new: Completion) -> dict[str, Any]:
        """The choice object for what is new; the first one brings the prompt, where it is echoed."""
        echo = self._echo if self._is_first else None
        choice: dict[str, Any] = {
            "index": index,
            "text": new.text if echo is None else echo.text + new.text,
            "logprobs": self._build_logprobs(output, new, echo),
            "finish_reason": new.finish_reason,
        }
        if new.finish_reason is not None:
            choice["stop_reason"] = new.stop_reason
        if self._fields.return_token_ids:
            choice["token_ids"] = list(new.token_ids)
            if self._is_first:
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
        self._is_first = False
        return choice

    def is_worth_sending(self, new: Completion) -> bool:
        """False for a token whose text is still held back, unless its id or figures are wanted."""
        return bool(
            new.text
            or new.finish_reason is not None
            or (self._is_first and self._echo is not None)
            or self._logprobs is not None
            or self._fields.return_token_ids
        )

    def _build_logprobs(self, output: PromptOutput, new: Completion, echo: Echo | None) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        token_ids: Sequence[int] = new.token_ids
        positions: list[Position | None] = list(new.logprobs or ())
        if echo is None:
            return self._logprobs.build(token_ids, positions)
        token_ids = [*output.prompt_token_ids, *token_ids]
        return self._logprobs.build(token_ids, [*echo.positions, *positions], echo.token_texts)


class CompletionAnswer:
    """The answer to one completion request."""

    def __init__(self, generation: Generation, fields: CompletionRequest, echoes: Sequence[Echo]) -> None:
        self._generation = generation
        self._fields = fields
        self._echoes = echoes

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return self._generation.is_stream

    def _builder(self, prompt_index: int) -> _ChoiceBuilder:
        echo = self._echoes[prompt_index] if self._echoes else None
        return _ChoiceBuilder(self._fields, echo, shows_ids=self._generation.shows_tokens_as_ids)

    def _note_prompt(self, prompt_index: int, output: PromptOutput) -> None:
        if self._echoes:
            self._echoes[prompt_index].note(output)

    async def whole(self) -> dict[str, Any]:
        """The `text_completion` object; choices in the order of prompts, then of `n`."""
        generation, usage = self._generation, self._generation.new_usage()
        choices: list[dict[str, Any]] = []
        async for prompt_index, output in generation.outputs():
            usage.add(prompt_index, output)
            self._note_prompt(prompt_index, output)
            for new in output.outputs:
                choice = self._builder(prompt_index).build(prompt_index * generation.n + new.index, output, new)
                if self._fields.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs_object(output.prompt_logprobs)
                choices.append(choice)
        return generation.answer("text_completion", choices, usage)

    @property
    def _is_plain(self) -> bool:
        """Whether chunks that go on bring text alone."""
        fields = self._fields
        has_more = fields.logprobs is not None or bool(fields.return_token_ids) or bool(self._echoes)
        return not has_more and not self._generation.includes_continuous_usage

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks with one choice each; the last of a choice has its finish reason."""
        generation, usage = self._generation, self._generation.new_usage()
        encoder = generation.new_encoder("text_completion")
        num_choices = len(generation.prompts) * generation.n
        builders = [self._builder(index // generation.n) for index in range(num_choices)]
        is_plain = self._is_plain
        outputs = generation.outputs()
        try:
            async for prompt_index, output in outputs:
                usage.add(prompt_index, output)
                self._note_prompt(prompt_index, output)
                extra = {"usage": usage.as_object()} if generation.includes_continuous_usage else {}
                for new in output.outputs:
                    index = prompt_index * generation.n + new.index
                    if is_plain and new.text and new.finish_reason is None:  # by far the most
                        yield encoder.encode_text(index, new.text)
                    elif builders[index].is_worth_sending(new):
                        end = {} if new.finish_reason is None else generation.fingerprint_fields
                        yield encoder.encode([builders[index].build(index, output, new)], extra | end)
        finally:
            await close(outputs)
        if generation.includes_usage:
            yield encoder.encode([], generation.end_fields(usage))
