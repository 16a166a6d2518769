"""Routes of the audio API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.responses import Response

from llmstack_server.apis.audio.prepare import prepare_transcription, prepare_translation
from llmstack_server.apis.audio.protocol import TranscriptionRequest, TranslationRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import Prepare
from llmstack_server.web.audio_types import Transcript
from llmstack_server.web.form_type import MEDIA_TYPE
from llmstack_server.web.openapi import TEXT, Schema
from llmstack_server.web.openapi_bodies import RequestBody
from llmstack_server.web.routes import Router, RouteSpec

_FILE: Final[Mapping[str, Schema]] = {"file": {"type": "string", "format": "binary"}, "model": TEXT}


class AudioBody(RequestBody):
    """A form with sound. A JSON body has the same fields, and `file_url` in place of `file`."""

    media_type = MEDIA_TYPE


def add_audio_routes(router: Router, state: ServerState) -> None:
    """Adds transcriptions and translations."""

    def add(path: str, prepare: Prepare, body: AudioBody, summary: str) -> None:
        spec = RouteSpec(
            "POST", path, Transcript, tag="Audio", body=body, streams=True, waits=True, is_in_batches=True
        )  # fmt: skip

        async def answer() -> Response:
            from llmstack_server.apis.audio.response import AudioResponse  # late: the parser of forms

            return AudioResponse(state, prepare)

        router.declare(spec, summary)(answer)

    add(
        "/v1/audio/transcriptions", prepare_transcription, AudioBody(TranscriptionRequest, required=_FILE),
        "The text of a sound file, in the language that is spoken",
    )  # fmt: skip
    add(
        "/v1/audio/translations", prepare_translation, AudioBody(TranslationRequest, required=_FILE),
        "The text of a sound file, in English",
    )  # fmt: skip
