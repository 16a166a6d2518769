"""Seconds from a word to its text in a realtime session, whose sound comes at the pace of speech.

python benchmarks/live_delay.py MODEL FILE.wav… --pace 1

`MODEL` is a Whisper folder, and each `FILE.wav` has speech. It is sent with 16,000 samples a second. The first text is
counted from where the sound stops being quiet. With `--pace 0.25` the sound comes at a quarter of its speed, and
seconds are those of the sound: that is nearly what a machine four times as fast would do.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import re
import socket
import statistics
import tempfile
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from long_speech import RATE, ask, serving, write_wav
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Message, Ping, Request

from llmstack_media.sound.samples import sound_samples

PIECE_S = 0.1
QUIET = 0.1
"""Share of the loudest tenth of a second below which nothing is said yet."""


class Session:
    """A realtime session in OpenAI's form."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self._socket = socket.create_connection((place.hostname, place.port), 120)
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._send(Request(host=f"{place.hostname}:{place.port}", target="/v1/realtime"))
        sound = {"format": {"type": "audio/pcm", "rate": RATE}, "transcription": {"model": "m"}, "turn_detection": None}
        next(self.events(AcceptConnection))
        self.tell("session.update", session={"type": "transcription", "audio": {"input": sound}})

    def tell(self, kind: str, **fields: Any) -> None:
        """Sends an event."""
        self._send(Message(data=json.dumps({"type": kind} | fields)))

    def events(self, kind: type) -> Iterator[Any]:
        """What comes of a kind."""
        while True:
            data = self._socket.recv(1 << 16)
            if not data:
                raise SystemExit("the server has closed the session")
            self._connection.receive_data(data)
            for event in self._connection.events():
                if isinstance(event, Ping):
                    self._send(event.response())
                if isinstance(event, kind):
                    yield event

    def _send(self, event: Any) -> None:
        self._socket.sendall(self._connection.send(event))


def speak(session: Session, data: bytes, pace: float, began_s: float) -> None:
    """Sends the sound, each piece once it is said."""
    size = 2 * int(PIECE_S * RATE)
    for number, start in enumerate(range(0, len(data), size), 1):
        time.sleep(max(0.0, began_s + number * PIECE_S / pace - time.monotonic()))
        session.tell("input_audio_buffer.append", audio=base64.b64encode(data[start : start + size]).decode())
    session.tell("input_audio_buffer.commit")


def measure(address: str, data: bytes, pace: float) -> list[tuple[float, str]]:
    """Seconds of the sound when each part of the text came, and that part; the whole text with the last."""
    session, said = Session(address), list[tuple[float, str]]()
    began_s = time.monotonic()
    speaking = threading.Thread(target=speak, args=(session, data, pace, began_s), daemon=True)
    speaking.start()
    text = ""
    for message in session.events(Message):
        text += message.data
        if not message.message_finished:
            continue
        event, text = json.loads(text), ""
        now_s = (time.monotonic() - began_s) * pace
        if event["type"] == "error":
            raise SystemExit(event["error"]["message"])
        if event["type"].endswith("delta"):
            said.append((now_s, event["delta"]))
        if event["type"].endswith("completed"):
            said.append((now_s, event["transcript"]))
            break
    speaking.join()
    return said


def first_sound_s(data: bytes) -> float:
    """Where the sound stops being quiet."""
    samples = np.frombuffer(data, "<i2").astype(np.float32)
    size = int(PIECE_S * RATE) // 5
    levels = np.sqrt(np.mean(samples[: len(samples) // size * size].reshape(-1, size) ** 2, axis=1))
    return float(np.argmax(levels > QUIET * levels.max()) * size / RATE)


def delays_s(said: list[tuple[float, str]], words: list[dict[str, Any]]) -> list[float]:
    """Of each word, from its end in the file to its text; words are those of the file as long as they are equal."""
    times = [(at_s, word) for at_s, delta in said[:-1] for word in delta.split()]
    pairs = zip(times, words, strict=False)
    return [at_s - one["end"] for (at_s, word), one in pairs if word.strip(".,") == one["word"].strip(" .,")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    firsts = list[float]()
    with serving(args.model, "--served-model-name", "m", "--dtype", "float32") as (_, address):
        for path in args.files:
            firsts += measured_file(address, path, args.pace, args.repeats)
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = found[1] if found else platform.machine()
    print(f"first text of {len(args.files)} files: median {statistics.median(firsts):.2f} s, {max(firsts):.2f} at most")
    print(f"{os.cpu_count()} processors, {name}, load {os.getloadavg()[0]:.1f}")


def measured_file(address: str, path: Path, pace: float, repeats: int) -> list[float]:
    """Prints what sessions with a file's sound are like; seconds to the first text of each."""
    with path.open("rb") as file:
        samples = np.concatenate(list(sound_samples(file, RATE, 3600.0)))
    with tempfile.NamedTemporaryFile(suffix=".wav") as copy:
        write_wav(Path(copy.name), samples)
        answer = json.loads(ask(address, Path(copy.name), "verbose_json", **{"timestamp_granularities[]": "word"}))
        with wave.open(copy.name) as written:
            data = written.readframes(written.getnframes())
    begin_s, firsts = first_sound_s(data), list[float]()
    for _ in range(repeats):
        said = measure(address, data, pace)
        delays = delays_s(said, answer["words"]) or [float("nan")]
        firsts.append(said[0][0] - begin_s)
        print(f"{path.stem}: first text {firsts[-1]:.2f} s behind the first sound: {said[0][1]!r}")
        print(f"  {len(delays)} words, {statistics.median(delays):.2f} s behind their end, {max(delays):.2f} at most")
        print(f"  the end is the file's: {said[-1][1].strip() == answer['text'].strip()}", flush=True)
    return firsts


if __name__ == "__main__":
    main()
