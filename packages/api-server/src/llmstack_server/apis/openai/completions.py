"""`POST /v1/completions`: OpenAI's encoding of completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from llmstack_llm import (
    CompletionOutput,
    GivenSampling,
    RequestOutput,
    check_fan_out,
    request_errors,
)
from llmstack_llm.requests import AdmittedRequest
from llmstack_server.apis.openai.answer import OpenAIAnswer
from llmstack_server.apis.openai.infilling import check_echo, with_suffix
from llmstack_server.apis.openai.protocol import COMPLETIONS, COMPLETIONS_OF_VECTORS, CompletionRequest
from llmstack_server.apis.openai.vectors import Prompt, prompts_of
from llmstack_server.chat.logprobs import CompletionLogprobs, Position, prompt_logprobs_object
from llmstack_server.chat.reasoning import thinking_tags_after
from llmstack_server.state.server_state import OutputStream, ServerState
from llmstack_server.web.answers import AnswerIds, answer_ids
from llmstack_server.web.checks import check_fields
from llmstack_server.web.clients import current_client
from llmstack_server.web.fields import parse
from llmstack_server.web.kv_transfer import read_kv_transfer
from llmstack_server.web.sampling import PARAM_NAMES, given_sampling
from llmstack_server.web.sse import Events
from llmstack_server.web.submission import submit_prompts
from llmstack_server.web.usage import UsageCounter

if TYPE_CHECKING:
    from llmstack_llm.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
MAX_NUMBERS_OF_EVENTS = 1 << 16
"""Log-probabilities of prompts in a stream: the event of each is made without a pause, in a tenth of a second."""


async def prepare_completion(state: ServerState, body: dict[str, object]) -> CompletionAnswer:
    """Checks a request and submits its prompts.

    Raises:
        InvalidRequestError: Names the first invalid field.
        ServerOverloadedError: Too many requests are waiting.
    """
    fields = parse(CompletionRequest, body)
    takes_vectors = state.config.engine.enable_prompt_embeds
    prompts = prompts_of(fields, body)
    check_fields(state, body, fields, COMPLETIONS_OF_VECTORS if takes_vectors else COMPLETIONS)
    if len(prompts) > 1:  # `n` is checked with the other sampling fields
        check_fan_out(len(prompts), 1, state.engine.limits)
    kv_transfer = None
    if fields.kv_transfer_params is not None:
        kv_transfer = read_kv_transfer(state, fields.kv_transfer_params, fields, len(prompts))
    check_echo(fields.suffix, fields.echo, has_source=state.engine.limits.max_source_tokens > 0)
    ids = answer_ids("cmpl", fields.request_id)
    if fields.request_id is not None:
        await state.request_ids.claim(current_client.get().tenant, fields.request_id)
    given, names = given_sampling(fields, PARAM_NAMES)
    if fields.logprobs is not None:
        given["logprobs"] = fields.logprobs
        if fields.echo and fields.prompt_logprobs is None:  # the log-probabilities include the prompt
            given["prompt_logprobs"], names = fields.logprobs, {**names, "prompt_logprobs": "logprobs"}
    given |= await _thinking_tags(state, fields, given, prompts)
    sampling = GivenSampling(given, names, is_echo=bool(fields.echo))
    if fields.suffix:
        add_special_tokens = fields.add_special_tokens is not False
        texts = [value for value, _ in prompts if not isinstance(value, Mapping)]
        filled = await with_suffix(state, texts, fields.suffix, add_special_tokens=add_special_tokens)
        prompts = [(value, param) for value, (_, param) in zip(filled, prompts, strict=True)]
    tokenizer = await state.engine.get_tokenizer("echo") if fields.echo else None
    outputs = await submit_prompts(
        state, prompts, sampling, ids.engine,
        model=fields.model, priority=fields.priority or 0, cache_salt=fields.cache_salt or "",
        default_max_tokens=DEFAULT_MAX_TOKENS, add_special_tokens=fields.add_special_tokens is not False,
        kv_transfer=kv_transfer,
    )  # fmt: skip
    has_logprobs = fields.logprobs is not None
    if fields.stream and fields.echo and has_logprobs:
        await _check_echo_of_stream(outputs)
    echoes = [] if tokenizer is None else [_echo(tokenizer, prompt, has_logprobs) for prompt in outputs.prompts]
    return CompletionAnswer(state, fields, ids, outputs, echoes)


async def _check_echo_of_stream(outputs: OutputStream) -> None:
    """Refuses log-probabilities of long prompts in a stream, each choice of which repeats them in one event.

    Raises:
        InvalidRequestError: Code `request_budget_exceeded`.
    """
    num_numbers = sum(
        len(one.prompt_token_ids) * ((one.sampling_params.prompt_logprobs or 0) + 1) * one.sampling_params.n
        for one in outputs.prompts
    )
    if num_numbers > MAX_NUMBERS_OF_EVENTS:
        await outputs.aclose()
        raise request_errors.answer_too_large("stream", MAX_NUMBERS_OF_EVENTS, num_numbers)


async def _thinking_tags(
    state: ServerState, fields: CompletionRequest, given: Mapping[str, object], prompts: Sequence[tuple[Prompt, str]]
) -> Mapping[str, object]:
    """The field with the tokens around the reasoning of the prompts, where the request has a budget for it."""
    parser = state.chat_parsers.reasoning
    if fields.thinking_token_budget is None or parser is None:
        return {}
    if "structured_outputs" in given:
        reason = "here, a constraint applies to the whole text, reasoning included"
        raise request_errors.invalid_value("thinking_token_budget", reason)
    tokenizer = await state.engine.get_tokenizer("thinking_token_budget")
    tags, *others = {
        thinking_tags_after(tokenizer, parser, value) for value, _ in prompts if not isinstance(value, Mapping)
    }
    if others:
        reason = "some of the prompts end inside reasoning and others outside; send them apart"
        raise request_errors.invalid_value("thinking_token_budget", reason)
    return {"thinking_tags": tags}


# What clients of vLLM find in every choice of a whole answer.
_NULL_EXTRAS: dict[str, object] = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}


class Echo:
    """A prompt that all choices of the answer repeat.

    Attributes:
        token_texts: One per token; empty unless log-probabilities are requested.
        positions: The prompt's log-probabilities, from the first output.
    """

    def __init__(self, text: str, token_texts: Sequence[str]) -> None:
        self.text = text
        self.token_texts = token_texts
        self.positions: Sequence[Position | None] = [None] * len(token_texts)

    def note(self, output: RequestOutput) -> None:
        """Keeps the prompt's log-probabilities of an output."""
        if output.prompt_logprobs is not None:
            self.positions = output.prompt_logprobs


def _echo(tokenizer: Tokenizer, prompt: AdmittedRequest, has_logprobs: bool) -> Echo:
    token_ids = prompt.prompt_token_ids
    text = prompt.prompt
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
    return Echo(text, [tokenizer.text_of(token_id) for token_id in token_ids] if has_logprobs else ())


class _ChoiceBuilder:
    """Builds the choice objects of one completion, chunk by chunk."""

    def __init__(self, fields: CompletionRequest, echo: Echo | None, *, shows_ids: bool) -> None:
        self._fields = fields
        self._echo = echo
        self._is_first = True
        self._logprobs: CompletionLogprobs | None = None
        if fields.logprobs is not None:
            num_shown = -1 if fields.logprob_token_ids else fields.logprobs
            self._logprobs = CompletionLogprobs(num_shown, shows_ids=shows_ids)

    def build(
        self, index: int, output: RequestOutput, new: CompletionOutput, logprobs: Mapping[str, object] | None
    ) -> dict[str, object]:
        """The choice object of new output; the first one includes the prompt, where it is echoed."""
        echo = self._echo if self._is_first else None
        choice: dict[str, object] = {
            "index": index,
            "text": new.text if echo is None else echo.text + new.text,
            "logprobs": logprobs,
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

    def is_worth_sending(self, new: CompletionOutput) -> bool:
        """False for a token whose text is withheld, unless its id or log-probability is requested."""
        return bool(
            new.text
            or new.finish_reason is not None
            or (self._is_first and self._echo is not None)
            or self._logprobs is not None
            or self._fields.return_token_ids
        )

    def logprobs(self, output: RequestOutput, new: CompletionOutput) -> Mapping[str, object] | None:
        """The `logprobs` object of new output; None where it was not asked for."""
        builder, found = self._logprobs, None
        if builder is None:
            return None
        for text in self._texts(output, new):
            found = builder.build(*text, found)
        return found

    async def whole_logprobs(self, output: RequestOutput, new: CompletionOutput) -> Mapping[str, object] | None:
        """The same, of all output at once; other requests run meanwhile."""
        builder, found = self._logprobs, None
        if builder is None:
            return None
        for text in self._texts(output, new):
            found = await builder.build_whole(*text, found)
        return found

    def _texts(
        self, output: RequestOutput, new: CompletionOutput
    ) -> Iterator[tuple[Sequence[int], Sequence[Position | None], Sequence[str]]]:
        """Token ids with their log-probabilities: of the prompt if it is echoed, with its texts, and of new output."""
        if self._is_first and self._echo is not None:
            yield output.prompt_token_ids, self._echo.positions, self._echo.token_texts
        yield new.token_ids, new.logprobs or (), ()


class CompletionAnswer(OpenAIAnswer):
    """The answer to one completion request."""

    CHUNK_OBJECT = "text_completion"

    def __init__(
        self,
        state: ServerState,
        fields: CompletionRequest,
        ids: AnswerIds,
        outputs: OutputStream,
        echoes: Sequence[Echo],
    ) -> None:
        super().__init__(state, fields, ids, outputs, UsageCounter(outputs.prompts))
        self._fields = fields
        self._echoes = echoes
        self._builders: list[_ChoiceBuilder] = []
        has_more = fields.logprobs is not None or bool(fields.return_token_ids) or bool(echoes)
        # The fast path: most chunks have text only.
        self._is_plain = not has_more and not self.includes_continuous_usage

    async def whole(self) -> dict[str, object]:
        """The `text_completion` object; choices in the order of prompts, then of `n`."""
        choices: list[dict[str, object]] = []
        async with self.outputs as outputs:
            async for output in outputs:
                self._note(output)
                for new in output.outputs:
                    index = output.prompt_index * self.n + new.index
                    builder = self._builder(output.prompt_index)
                    logprobs = await builder.whole_logprobs(output, new)
                    choice = builder.build(index, output, new, logprobs)
                    if self._fields.prompt_logprobs is not None:
                        choice["prompt_logprobs"] = await prompt_logprobs_object(output.prompt_logprobs)
                    choices.append(_NULL_EXTRAS | choice)
        return self.answer("text_completion", choices) | self.transfer_fields()

    async def events(self) -> AsyncIterator[Events]:
        """Chunks with one choice each; the last of a choice has its finish reason."""
        self._builders = [self._builder(index // self.n) for index in range(len(self.outputs.prompts) * self.n)]
        async with self.outputs as outputs:
            async for output in outputs:
                event = self.encode(output)
                if event:
                    yield event
        if self.sign is not None:
            yield self.encoder.encode([], self.receipt_fields())
        if self.includes_usage:
            yield self.encoder.encode([], self.end_fields())

    def encode(self, output: RequestOutput) -> Events:
        self._note(output)
        encoder, builders = self.encoder, self._builders
        if self._is_plain and len(output.outputs) == 1:
            new = output.outputs[0]
            if new.text and new.finish_reason is None:
                return encoder.encode_text(output.prompt_index * self.n + new.index, new.text)
        events = []
        for new in output.outputs:
            counts_sent = self.includes_continuous_usage
            extra = {"usage": self.usage.sent_object(len(new.token_ids))} if counts_sent else {}
            index = output.prompt_index * self.n + new.index
            if builders[index].is_worth_sending(new):
                end = {} if new.finish_reason is None else self.fingerprint_fields()
                logprobs = builders[index].logprobs(output, new)
                events.append(encoder.encode([builders[index].build(index, output, new, logprobs)], extra | end))
        return events

    def _builder(self, prompt_index: int) -> _ChoiceBuilder:
        echo = self._echoes[prompt_index] if self._echoes else None
        return _ChoiceBuilder(self._fields, echo, shows_ids=self.shows_tokens_as_ids)

    def _note(self, output: RequestOutput) -> None:
        self.usage.add(output)
        if self._echoes:
            self._echoes[output.prompt_index].note(output)
