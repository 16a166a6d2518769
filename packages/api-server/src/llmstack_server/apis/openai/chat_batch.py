"""`POST /v1/chat/completions/batch`: one answer to several conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llmstack_llm import request_errors
from llmstack_server.apis.openai.chat import ChatCompletion, prepare_chat
from llmstack_server.apis.openai.protocol import BATCH, BatchChatRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import AnswerIds, WholeAnswer, claim_ids
from llmstack_server.web.checks import check_fields
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import parse
from llmstack_types import InvalidRequestError
from llmstack_types.json_values import JSONObject

MAX_NUM_CONVERSATIONS = 128


async def prepare_chat_batch(state: ServerState, body: JSONObject) -> BatchAnswer:
    """Checks a request and submits its conversations, all of them or none.

    Raises:
        InvalidRequestError: Names the first invalid field.
        ServerOverloadedError: Too many requests are waiting.
    """
    fields = parse(BatchChatRequest, body)
    if fields.messages is None:
        raise missing_parameter("messages")
    if not fields.messages:
        raise request_errors.empty_array("messages")
    if len(fields.messages) > MAX_NUM_CONVERSATIONS:
        raise request_errors.array_too_long("messages", MAX_NUM_CONVERSATIONS, len(fields.messages))
    check_fields(state, body, fields, BATCH)
    ids = await claim_ids(state, "chatcmpl", fields.request_id)
    shared = {name: value for name, value in body.items() if name not in ("messages", "request_id")}
    answers: list[ChatCompletion] = []
    try:
        for index, messages in enumerate(fields.messages):
            answers.append(await _prepare(state, {**shared, "messages": messages}, index))
    except BaseException:
        await _close(answers)
        raise
    return BatchAnswer(ids, answers)


async def _prepare(state: ServerState, body: JSONObject, index: int) -> ChatCompletion:
    try:
        return await prepare_chat(state, body)
    except InvalidRequestError as error:
        param = error.param or ""
        if not param.startswith("messages"):
            raise
        name = param.replace("messages", f"messages[{index}]", 1)
        message = error.message.replace(f"'{param}'", f"'{name}'")
        raise InvalidRequestError(message, param=name, code=error.code) from None


class BatchAnswer(WholeAnswer):
    """One choice per conversation, in their order."""

    def __init__(self, ids: AnswerIds, answers: Sequence[ChatCompletion]) -> None:
        self._ids = ids
        self._answers = answers

    async def whole(self) -> JSONObject:
        """The `chat.completion` object; its usage is that of all conversations."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer.whole()) for answer in self._answers]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await _close(self._answers)  # also those that have not begun
        found = [task.result() for task in tasks]
        choices = [one["choices"][0] | {"index": index} for index, one in enumerate(found)]
        usage = _sum([one["usage"] for one in found])
        receipts = [one.pop("receipt") for one in found if "receipt" in one]
        answer = found[0] | {"id": self._ids.answer, "choices": choices, "usage": usage}
        return answer | {"receipts": receipts} if receipts else answer


async def _close(answers: Sequence[ChatCompletion]) -> None:
    for answer in answers:
        await answer.outputs.aclose()


def _sum(usages: Sequence[JSONObject]) -> JSONObject:
    """The sums of equal names; nested objects are summed as well."""
    total: JSONObject = {}
    for name, value in usages[0].items():
        values = [usage[name] for usage in usages]
        total[name] = _sum(values) if isinstance(value, dict) else sum(values)
    return total
