"""Pictures that a conversation names by the id of an uploaded file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from llmstack_llm import request_errors
from llmstack_llm.media.parts import MediaPart
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client
from llmstack_types import InvalidRequestError

Messages = Sequence[Mapping[str, object]]
MAX_STORED_MEDIA: Final = 1024
"""Of one request, before each model's own limit is looked at: each id is looked up in the table of files."""


def media_in(messages: Messages) -> Iterator[MediaPart]:
    """The media of messages that are built from another API's."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, MediaPart))


async def with_stored_media(state: ServerState, messages: Messages) -> Messages:
    """The messages with the path of each file that they name by its id. A key finds its own files alone.

    Raises:
        InvalidRequestError: This server keeps no files, there are too many, or there is none with an id.
        HTTPError: 503, while the table of files cannot be read.
    """
    stored = [part for part in media_in(messages) if part.file_id]
    if not stored:
        return messages
    if state.stored_files is None:
        raise request_errors.unsupported_parameter(stored[0].param, "this server keeps no files (--state-dir)")
    if len(stored) > MAX_STORED_MEDIA:
        message = f"A request names at most {MAX_STORED_MEDIA} files."
        raise InvalidRequestError(message, param=stored[MAX_STORED_MEDIA].param, code="too_many_images")
    owner = current_client.get().tenant
    paths = await state.stored_files.paths({part.file_id for part in stored}, owner)
    for part in stored:
        if part.file_id not in paths:
            raise InvalidRequestError("There is no file with this id.", param=part.param, code="not_found")
    return [_with_paths(message, paths) for message in messages]


def _with_paths(message: Mapping[str, object], paths: Mapping[str, str]) -> Mapping[str, object]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        dataclasses.replace(part, path=paths[part.file_id]) if isinstance(part, MediaPart) and part.file_id else part
        for part in content
    ]
    return {**message, "content": parts}
