"""What clients of realtime sessions send in tests, and what a session of `SpeechEngine` says."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from llmstack_server.options.config import HTTPConfig
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, ready_state

PATH = "/v1/realtime"
TEXTS = (" And so,", " my fellow Americans")
TEXT = "And so, my fellow Americans"
OPENAI = {"type": "session.update", "session": {"type": "transcription", "audio": {"input": {
    "format": {"type": "audio/pcm", "rate": 16_000}, "transcription": {"model": "fake", "language": "en"},
}}}}  # fmt: skip
VLLM = {"type": "session.update", "model": "fake"}
COMMIT = {"type": "input_audio_buffer.commit"}
FINAL = {**COMMIT, "final": True}


def append(seconds: float = 1.0, rate: int = 16_000, **fields: Any) -> dict[str, Any]:
    samples = 9000 * np.sin(np.arange(int(seconds * rate)) / rate * 2765)
    audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
    return {"type": "input_audio_buffer.append", "audio": audio, **fields}


def state_of(engine: FakeEngineClient, **http: Any) -> ServerState:
    return ready_state(engine, HTTPConfig(**http))
