"""`llmstack transcribe`: files into texts and subtitles, over an application with a model that speaks."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers.speech import SpeechEngine, wav

from llmstack_server.apis.batches.transport import AppTransport
from llmstack_server.app import build_app
from llmstack_server.commands import TranscribeCommand
from llmstack_server.commands.transcribe import run
from llmstack_server.testing import ready_state


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    TranscribeCommand().add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> list[SpeechEngine]:
    """The engines that a command has started, in place of those of models."""
    engines: list[SpeechEngine] = []

    @contextlib.asynccontextmanager
    async def own_engine(config: Any) -> AsyncIterator[AppTransport]:
        engine = SpeechEngine(" And so,", " my fellow Americans")
        engines.append(engine)
        state = ready_state(engine, config.http, config.served_model_names)
        yield AppTransport(build_app(state), engine.check_health)
        await engine.speech.shutdown()

    monkeypatch.setattr(run, "own_engine", own_engine)
    return engines


def test_files_become_subtitles_and_one_that_fails_stops_no_other(
    model: list[SpeechEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.wav").write_bytes(wav())
    (tmp_path / "text.wav").write_text("no sound")
    files = [str(tmp_path / f"{name}.wav") for name in ("one", "text", "none", "two")]
    line = [*files, "--model", "m", "--format", "srt", "-o", str(tmp_path / "out"), "--language", "en", "--prompt", "P"]
    assert TranscribeCommand().run(parsed(*line)) == 1
    expected = "1\n00:00:00,000 --> 00:00:00,500\nAnd so,\n\n2\n00:00:00,500 --> 00:00:01,000\nmy fellow Americans\n\n"
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        ("one.srt", "two.srt"), expected
    )
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 2
    assert "text.wav: This is not audio of an allowed format" in "".join(errors)
    prompt: Any = model[0].requests[0].prompt
    assert prompt.token_ids == [302, *b" P", 301, 303, 305]


def test_texts_are_printed_in_the_order_of_the_line(
    model: list[SpeechEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.wav").write_bytes(wav())
    (tmp_path / "b.wav").write_bytes(wav(amplitude=0.0))
    files = [str(tmp_path / name) for name in ("a.wav", "b.wav")]
    assert TranscribeCommand().run(parsed(*files, "--model", "m", "--translate")) == 0
    assert capsys.readouterr().out == "And so, my fellow Americans\n\n"
    prompt: Any = model[0].requests[-1].prompt
    assert prompt.token_ids == [301, 304, 306]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a.wav", "b.wav", "--format", "srt"], "--output-dir: subtitles of several files need a folder"),
        (["a.wav", "a.mp3", "-o", "x"], "--output-dir: two files have the same name but for its end"),
        (["a.wav", "--format", "pdf"], "--format"),
        (["a.wav", "--url", "http://h", "--model", "m"], "--model: the server at --url has a model of its own"),
    ],
)
def test_options_at_fault_are_named(words: list[str], problem: str) -> None:
    (found,) = TranscribeCommand().problems(parsed(*words))
    assert found.startswith(problem)
