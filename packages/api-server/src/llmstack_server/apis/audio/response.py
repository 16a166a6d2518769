"""The response of a route that takes a form with sound, or JSON that names it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from typing import BinaryIO, Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from llmstack_llm import request_errors
from llmstack_server.apis.audio.prepare import MAX_PROMPT_CHARS, UploadedSound, speech_of
from llmstack_server.apis.audio.protocol import LISTS, TranscriptionRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse, Prepare
from llmstack_server.web.body import check_media_type
from llmstack_server.web.fields import parse
from llmstack_server.web.form_type import is_form
from llmstack_server.web.forms import Form, read_head, receive_form
from llmstack_types import ServerOverloadedError
from llmstack_types.json_values import JSONObject

MAX_PARTS: Final = 64
_MAX_FIELD_BYTES: Final = 4 * MAX_PROMPT_CHARS


class AudioResponse(GenerationResponse):
    """The response of one request. The file of a form is on the disk until it ends, and in no folder."""

    def __init__(self, state: ServerState, prepare: Prepare) -> None:
        super().__init__(state, prepare)
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send, body: dict[str, object] | None = None) -> None:
        """Answers one request; its errors before the first byte are raised."""
        headers = Headers(scope=scope)
        if not is_form(headers):
            check_media_type(headers)
        await speech_of(self._state)  # before 25 MB are read for a model that takes none
        if not is_form(headers):
            await super().__call__(scope, receive, send, body)
            return
        http = self._state.config.http
        max_bytes = http.max_upload_mb << 20
        boundary, _ = read_head(headers, max_bytes)
        with await asyncio.to_thread(_new_file) as file:
            form = Form(boundary, file, max_bytes, max_parts=MAX_PARTS, max_field_bytes=_MAX_FIELD_BYTES)
            await receive_form(receive, form, _in_thread, http.receive_timeout_s)
            fields = form_body(form.values)
            await super().__call__(scope, receive, send, {**fields, "file": UploadedSound(file)})


def form_body(values: dict[str, list[str]]) -> dict[str, object]:
    """The fields of a form as JSON has them: numbers, booleans and lists by the types of the request.

    Raises:
        InvalidRequestError: A field comes twice, or has another type.
    """
    body: JSONObject = {}
    for name, texts in values.items():
        bare = name.removesuffix("[]")
        if bare in LISTS or name.endswith("[]"):
            body.setdefault(bare, []).extend(texts)
        elif len(texts) > 1:
            raise request_errors.invalid_value(name[:64], "it comes more than once")
        else:
            body[name] = texts[0]
    typed = parse(TranscriptionRequest, body, is_text=True).model_dump(exclude_unset=True)
    return {**body, **typed}


def _new_file() -> BinaryIO:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise ServerOverloadedError("there is no room for uploads", reason="media") from error


async def _in_thread(work: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(work)
    except OSError as error:
        raise ServerOverloadedError("there is no room for uploads", reason="media") from error
