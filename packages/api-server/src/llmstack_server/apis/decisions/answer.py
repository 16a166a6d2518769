"""The route `/v1/decisions`: probabilities of answers to questions about a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llmstack_llm import ChatPrompt, CheckedSampling, RenderedPrompt, RequestOutput, check_fan_out, request_errors
from llmstack_server.apis.decisions.protocol import DecisionRequest, read_input, read_questions
from llmstack_server.apis.decisions.questions import LABELS, Question
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.reasoning import is_open_in
from llmstack_server.state.server_state import OutputStream, ServerState
from llmstack_server.web.answers import WholeAnswer, new_id
from llmstack_server.web.checks import check_fields
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, engine_unavailable
from llmstack_server.web.fields import parse
from llmstack_server.web.submission import submit_prompts
from llmstack_types.json_values import JSONObject

MAX_IDENTIFIER_CHARS: Final = 128
MAX_NUM_CHARS: Final = 1 << 24
"""Of the prompts of all questions, which are tokenized one after another: that takes some seconds."""
# The distribution of the model itself, whatever its `generation_config.json` changes.
_SAMPLING: Final = {
    "temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
    "max_tokens": 1, "logprobs": 0, "detokenize": False,
}  # fmt: skip
# Names that templates have for it.
_NO_THINKING: Final = {"enable_thinking": False, "thinking": False}


async def prepare_decisions(state: ServerState, body: JSONObject) -> DecisionsAnswer:
    """Checks a request, renders a prompt for each question, and submits the first one.

    Raises:
        InvalidRequestError: Names the first invalid field, or the model cannot answer by letters.
        ServerOverloadedError: Too many requests are waiting.
    """
    fields = parse(DecisionRequest, body)
    check_fields(state, body, fields, {})
    name = fields.safety_identifier or ""
    if len(name) > MAX_IDENTIFIER_CHARS:
        raise request_errors.string_too_long("safety_identifier", MAX_IDENTIFIER_CHARS, len(name))
    about, questions = read_input(fields.input), read_questions(fields.questions)
    check_fan_out(len(questions), 1, state.engine.limits, param="questions")
    _check_size(len(about) * len(questions))  # before there are so many copies of it
    form = await _Form.of(state, max(len(question.options) for question in questions))
    texts = [question.prompt(about, is_continued=form.is_continued) for question in questions]
    _check_size(sum(map(len, texts)))
    prompts = [await _render(state, text, form.sampling) for text in texts]
    # A request must not be refused by its own questions.
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    state.engine.check_room(len(prompts), num_tokens, current_client.get().tenant, "questions")
    answer = DecisionsAnswer(state, fields.model, questions, prompts, form)
    await answer.begin()
    return answer


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_NUM_CHARS:
        raise request_errors.too_much_text("input", MAX_NUM_CHARS, num_chars)


class _Form(NamedTuple):
    """The form in which the model answers by a letter.

    Attributes:
        label_ids: The token of each letter at the start of an answer.
        is_continued: Whether the model has no chat template, so that its answer continues the prompt.
        sampling: Of every question: their prompts are submitted together.
    """

    label_ids: list[int]
    is_continued: bool
    sampling: CheckedSampling

    @classmethod
    async def of(cls, state: ServerState, num_labels: int) -> _Form:
        """The form of the served model.

        Raises:
            InvalidRequestError: A letter is no token by itself there, or every answer begins with reasoning.
        """
        engine = state.engine
        tokenizer = await engine.get_tokenizer("questions")
        is_continued = engine.chat_template.is_fallback
        text = (await _render(state, "Answer:", engine.check_sampling(_SAMPLING))).text
        parser = state.chat_parsers.reasoning
        if parser is not None and is_open_in(text, Conversation([], chat_template_kwargs=_NO_THINKING), parser):
            raise request_errors.unsupported_value("model", "its answers begin with reasoning, and not with a letter")
        start = tokenizer.encode(text, add_special_tokens=False)
        label_ids = []
        for label in LABELS[:num_labels]:
            token_ids = tokenizer.encode(f"{text} {label}" if is_continued else text + label, add_special_tokens=False)
            if token_ids[:-1] != start or token_ids[-1] in label_ids:
                reason = f"the letter {label} is no token of its own at the start of an answer of this model"
                raise request_errors.unsupported_value("model", reason)
            label_ids.append(token_ids[-1])
        return cls(label_ids, is_continued, engine.check_sampling({**_SAMPLING, "logprob_token_ids": label_ids}))


async def _render(state: ServerState, text: str, sampling: CheckedSampling) -> RenderedPrompt:
    kwargs = {**state.config.chat.template_kwargs, **_NO_THINKING}
    chat = ChatPrompt([{"role": "user", "content": text}], template_kwargs=kwargs, tenant=current_client.get().tenant)
    return await state.engine.render(chat, sampling)


class _Read(NamedTuple):
    """The engine's result for one question: log-probabilities by token, and cached tokens of its prompt."""

    logprobs: dict[int, float]
    num_prompt_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> _Read:
        """From the one output of a prompt.

        Raises:
            HTTPError: 503, it was aborted before its token.
        """
        if not output.outputs[0].logprobs:
            raise HTTPError(engine_unavailable("The request was ended before its answer was computed."))
        [position] = output.outputs[0].logprobs
        logprobs = {token_id: entry.logprob for token_id, entry in position.items()}
        return cls(logprobs, len(output.prompt_token_ids), output.num_cached_tokens or 0)


async def _read_all(stream: OutputStream) -> list[_Read]:
    found: dict[int, _Read] = {}
    async with stream as outputs:
        async for output in outputs:
            found[output.prompt_index] = _Read.of(output)
    return [found[index] for index in sorted(found)]


class DecisionsAnswer(WholeAnswer):
    """The answers to the questions of one request.

    The prompt of the first is computed alone, so that the others find in the cache what they share with it.
    """

    def __init__(
        self,
        state: ServerState,
        model: str | None,
        questions: Sequence[Question],
        prompts: Sequence[RenderedPrompt],
        form: _Form,
    ) -> None:
        """`model`: The name in the request. `prompts`: Those of the questions, in their order."""
        self._state, self._model, self._form = state, model, form
        self._questions, self._prompts = questions, prompts
        self._first: OutputStream | None = None

    async def begin(self) -> None:
        """Submits the first prompt; raises as `submit_prompts`."""
        self._first = await self._submit(self._prompts[:1])

    async def whole(self) -> JSONObject:
        """The answers in the order of the questions, and the tokens of all prompts."""
        reads = [] if self._first is None else await _read_all(self._first)
        if len(self._prompts) > len(reads):
            reads += await _read_all(await self._submit(self._prompts[len(reads) :]))
        label_ids = self._form.label_ids
        answers = [
            question.answer([read.logprobs[one] for one in label_ids[: len(question.options)]])
            for question, read in zip(self._questions, reads, strict=True)
        ]
        return {"model": self._model or self._state.served_model_name, "answers": answers, "usage": _usage(reads)}

    async def _submit(self, prompts: Sequence[RenderedPrompt]) -> OutputStream:
        named = [(prompt, "input") for prompt in prompts]
        return await submit_prompts(self._state, named, self._form.sampling, new_id("decision"), model=self._model)


def _usage(reads: Sequence[_Read]) -> JSONObject:
    num_input, num_output = sum(read.num_prompt_tokens for read in reads), len(reads)
    num_cached = sum(read.num_cached_tokens for read in reads)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_input - num_cached},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
