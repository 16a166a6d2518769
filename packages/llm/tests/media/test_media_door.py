"""What decodes for a model ends when another one is served, and no request uses it any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import media_door
from llmstack_llm.media_door import MediaDoor
from llmstack_llm.speech.served import SpeechCounts


class Decoding:
    """Stands for what decodes."""

    def __init__(self) -> None:
        self.counts = SpeechCounts()
        self.is_over = False

    async def shutdown(self) -> None:
        self.is_over = True


class Door:
    """The door of a model, and the requests that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, preparing_s: float = 0.0) -> None:
        monkeypatch.setattr(media_door, "PREPARING_S", preparing_s)
        monkeypatch.setattr(media_door, "_POLL_S", 0.0)
        self.running = {"a", "b"}
        self.door: Any = MediaDoor(Path("first"))
        self.pictures = self.door.processor = Decoding()
        self.speech = self.door.speech = Decoding()

    async def serve(self, folder: str) -> None:
        self.door.set_model(Path(folder), lambda: self.running)
        await self.turns()

    async def turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_it_ends_after_the_requests_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(monkeypatch)
    await door.serve("first")
    assert door.door.processor is door.pictures  # the same model
    await door.serve("second")
    assert (door.door.processor, door.door.speech, door.pictures.is_over) == (None, None, False)
    door.running = {"b", "c"}
    await door.turns()
    assert not door.pictures.is_over
    door.running = {"c"}  # which came later
    await door.turns()
    assert door.pictures.is_over
    assert door.speech.is_over


async def test_it_stays_while_a_session_has_sound_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(monkeypatch)
    door.running.clear()
    door.speech.counts.num_sessions = 1
    await door.serve("second")
    assert not door.speech.is_over
    door.speech.counts.num_sessions = 0
    await door.turns()
    assert door.speech.is_over


@pytest.mark.parametrize("is_begun", [False, True])
async def test_the_end_of_the_server_ends_all_of_it(monkeypatch: pytest.MonkeyPatch, is_begun: bool) -> None:
    door = Door(monkeypatch, preparing_s=60.0)
    door.door.set_model(Path("second"), lambda: door.running)
    if is_begun:
        await door.turns()
    now = door.door.processor = Decoding()
    await door.door.shutdown()
    assert [one.is_over for one in (door.pictures, door.speech, now)] == [True, True, True]
    assert not door.door._leaving
