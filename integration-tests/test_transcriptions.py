"""Transcriptions through a whole server: the official client, batches of a file, `llmstack transcribe`, real speech."""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folders import model_folder
from openai import OpenAI
from speech_model import SECONDS, save_speech_model, sound

from llmstack_llm.testing import byte_tokenizer

KENNEDY = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"


folder = model_folder(save_speech_model, lambda path: byte_tokenizer(()).save(str(path / "tokenizer.json")))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three windows of sound, and pauses between them."""
    path = tmp_path_factory.mktemp("sound") / "sound.wav"
    pause = np.zeros(16_000, np.float32)
    write_wav(path, np.concatenate([part for seed in range(3) for part in (sound(seed), pause)]))
    return path


def write_wav(path: Path, samples: Any) -> None:
    with wave.open(str(path), "wb") as written:
        written.setparams((1, 2, 16_000, 0, "NONE", ""))
        written.writeframes((np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes())


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = ("--dtype", "float32", "--served-model-name", "m", "--state-dir", str(tmp_path_factory.mktemp("state")))
    with serve(str(folder), *options) as one:
        yield one


def transcribed(server: Any, path: Path, **options: Any) -> Any:
    """The answer of the official client, or the events of a stream."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client, path.open("rb") as file:
        answer = client.audio.transcriptions.create(file=file, model="m", **options)
        return list(answer) if options.get("stream") else answer


def test_the_official_client_has_the_same_text_in_every_format(server: Any, file: Path) -> None:
    options: dict[str, Any] = {"language": "en", "temperature": 0}
    verbose = transcribed(server, file, response_format="verbose_json", **options)
    assert verbose.duration == pytest.approx(3 * SECONDS + 3)
    assert verbose.segments
    for one in verbose.segments:
        assert 0 <= one.start <= one.end <= verbose.duration
    assert transcribed(server, file, **options).text == verbose.text
    events = transcribed(server, file, stream=True, **options)
    assert "".join(one.delta for one in events[:-1]) == events[-1].text == verbose.text
    subtitles = transcribed(server, file, response_format="srt", **options)
    assert subtitles.count("-->") == len(verbose.segments)


def test_the_example_of_the_page_runs(server: Any, file: Path, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "speech.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (beams,) = [block for block in blocks if "use_beam_search" in block]
    code = f"{blocks[0]}{beams}print('beams:', answer.text)\n"
    shutil.copy(file, tmp_path / "jfk.wav")
    (tmp_path / "example.py").write_text(code.replace("http://localhost:8000", server.url))
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "-->" in done.stdout
    assert "beams:" in done.stdout


def test_a_file_is_searched_with_beams_also_after_a_kill(folder: Path, serve: Callable[..., Any], file: Path) -> None:
    options: dict[str, Any] = {"language": "en", "temperature": 0}
    one, four = ({**options, "extra_body": {"use_beam_search": True, "n": n, "length_penalty": 2}} for n in (1, 4))
    with serve(str(folder), "--dtype", "float32", "--served-model-name", "m") as server:
        assert transcribed(server, file, **one).text == transcribed(server, file, **options).text
        expected = transcribed(server, file, **four)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(transcribed, server, file, **four) for _ in range(2)]
            server.wait_for(lambda: server.metric("vllm:num_requests_running") >= 4, "the first beams")
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert [one.result().text for one in waiting] == [expected.text] * 2


def lines_of(file: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of requests, by `custom_id`."""
    url = "data:audio/wav;base64," + base64.b64encode(file.read_bytes()).decode()
    asked = {
        "json": ("transcriptions", {"language": "en", "temperature": 0}),
        "srt": ("transcriptions", {"language": "en", "temperature": 0, "response_format": "srt"}),
        "english": ("translations", {"language": "de", "temperature": 0}),
        "wrong": ("transcriptions", {"file_url": "file:///etc/passwd"}),
    }
    return {
        name: (f"/v1/audio/{path}", {"model": "m", "file_url": url, **body}) for name, (path, body) in asked.items()
    }


def written(lines: dict[str, tuple[str, dict[str, Any]]]) -> str:
    entries = [{"custom_id": name, "method": "POST", "url": path, "body": body} for name, (path, body) in lines.items()]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def check_transcripts(answers: dict[str, Any], text: str) -> None:
    assert {name: one["status_code"] for name, one in answers.items()} == {
        "json": 200, "srt": 200, "english": 200, "wrong": 400
    }  # fmt: skip
    assert answers["json"]["body"]["text"] == text
    assert "-->" in answers["srt"]["body"]
    assert answers["wrong"]["body"]["error"]["code"] == "media_url_not_allowed"


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_file_of_requests_has_transcripts(
    server: Any, folder: Path, file: Path, tmp_path: Path, is_remote: bool
) -> None:
    (tmp_path / "in").write_text(written(lines_of(file)))
    own = ("--model", str(folder), "--served-model-name", "m", "--dtype", "float32")
    where = ("--url", server.url) if is_remote else own
    run("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *where)
    answers = {
        one["custom_id"]: one["response"] for one in map(json.loads, (tmp_path / "out").read_text().splitlines())
    }
    check_transcripts(answers, transcribed(server, file, language="en", temperature=0).text)


def test_a_batch_has_transcripts_and_translations(server: Any, file: Path) -> None:
    lines, answers = lines_of(file), {}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for endpoint in sorted({path for path, _ in lines.values()}):
            content = written({name: one for name, one in lines.items() if one[0] == endpoint}).encode()
            uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch: Any = client.batches.create(
                input_file_id=uploaded.id,
                endpoint=endpoint,  # type: ignore[arg-type]  # vLLM's, which the client's own list lacks
                completion_window="24h",
            )
            while batch.status not in ("completed", "failed"):
                time.sleep(0.05)
                batch = client.batches.retrieve(batch.id)
            assert batch.status == "completed", batch.errors
            for found in filter(None, (batch.output_file_id, batch.error_file_id)):
                for line in client.files.content(found).text.splitlines():
                    one = json.loads(line)
                    answers[one["custom_id"]] = one["response"]
    check_transcripts(answers, transcribed(server, file, language="en", temperature=0).text)


def run(*words: str) -> str:
    command = [sys.executable, "-m", "llmstack_command", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_writes_subtitles_by_a_server(server: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "subtitles"
    run("transcribe", str(file), "--url", server.url, "--language", "en", "--format", "vtt", "-o", str(out))
    assert (out / "sound.vtt").read_text().startswith("WEBVTT\n\n00:00:0")


# With trained weights. Folders: whisper-tiny.en, and speech with jfk.wav, jfk.mp3 and two_cities.wav.
REAL = os.environ.get("LLMSTACK_SPEECH", "")


@pytest.fixture(scope="module")
def english(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(f"{REAL}/whisper-tiny.en", "--dtype", "float32", "--served-model-name", "m") as one:
        yield one


def words_of(text: str) -> list[str]:
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


@pytest.mark.full
@pytest.mark.skipif(not REAL, reason="needs LLMSTACK_SPEECH")
def test_the_official_client_prints_the_sentence_of_kennedy(english: Any) -> None:
    answer = transcribed(english, Path(f"{REAL}/speech/jfk.wav"))
    assert words_of(answer.text) == KENNEDY.split()
    searched = transcribed(
        english, Path(f"{REAL}/speech/jfk.wav"), response_format="verbose_json",
        timestamp_granularities=["word"], extra_body={"use_beam_search": True, "n": 5},
    )  # fmt: skip
    assert words_of(searched.text) == KENNEDY.split()
    assert [words_of(word.word) for word in searched.words] == [[word] for word in KENNEDY.split()]


@pytest.mark.full
@pytest.mark.skipif(not REAL, reason="needs LLMSTACK_SPEECH")
@pytest.mark.timeout(900)
def test_five_minutes_of_speech_lose_no_word(english: Any, tmp_path: Path) -> None:
    parts = [transcribed(english, Path(f"{REAL}/speech/{name}.wav")).text for name in ("jfk", "two_cities")]
    joined = tmp_path / "joined.wav"
    write_wav(joined, np.concatenate([samples_of(name) for name in ("jfk", "two_cities")] * 6))
    found = transcribed(english, joined, response_format="verbose_json")
    assert found.duration > 300
    expected = words_of(" ".join(parts)) * 6
    matcher = difflib.SequenceMatcher(None, expected, words_of(found.text), autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    # A word may be understood otherwise beside another speaker; none is left out, and none is added.
    assert {kind for kind, *_ in changes} <= {"replace"}
    assert sum(end - start for _, start, end, *_ in changes) <= 0.02 * len(expected)
    starts = [one.start for one in found.segments or []]
    assert starts == sorted(starts)


def samples_of(name: str) -> Any:
    from llmstack_media.sound.samples import sound_samples

    with open(f"{REAL}/speech/{name}.wav", "rb") as opened:
        samples = np.concatenate(list(sound_samples(opened, 16_000, 3600.0)))
    return 0.7 * samples / np.abs(samples).max()
