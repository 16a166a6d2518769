"""Seconds from a word to its text in a realtime session, whose sound comes at the pace of speech.

python benchmarks/live_delay.py MODEL FILE.wav --pace 1

`MODEL` is a Whisper folder, and `FILE.wav` has speech of one channel and 16 bits. The first text is counted from where
the sound stops being quiet. With `--pace 0.25` the sound comes at a quarter of its speed, and seconds are those of the
sound: that is nearly what a machine four times as fast would do.
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import statistics
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from long_speech import ask, serving
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Message, Ping, Request

PIECE_S = 0.1
QUIET = 0.1
"""Share of the loudest tenth of a second below which nothing is said yet."""


class Session:
    """A realtime session in OpenAI's form."""

    def __init__(self, address: str, rate: int) -> None:
        place = urlsplit(address)
        self._socket = socket.create_connection((place.hostname, place.port), 120)
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._send(Request(host=f"{place.hostname}:{place.port}", target="/v1/realtime"))
        sound = {"format": {"type": "audio/pcm", "rate": rate}, "transcription": {"model": "m"}, "turn_detection": None}
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


def speak(session: Session, data: bytes, rate: int, pace: float, began_s: float) -> None:
    """Sends the sound, each piece once it is said."""
    size = 2 * int(PIECE_S * rate)
    for number, start in enumerate(range(0, len(data), size), 1):
        time.sleep(max(0.0, began_s + number * PIECE_S / pace - time.monotonic()))
        session.tell("input_audio_buffer.append", audio=base64.b64encode(data[start : start + size]).decode())
    session.tell("input_audio_buffer.commit")


def measure(address: str, data: bytes, rate: int, pace: float) -> list[tuple[float, str]]:
    """Seconds of the sound when each part of the text came, and that part; the whole text with the last."""
    session, said = Session(address, rate), list[tuple[float, str]]()
    began_s = time.monotonic()
    speaking = threading.Thread(target=speak, args=(session, data, rate, pace, began_s), daemon=True)
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


def first_sound_s(data: bytes, rate: int) -> float:
    """Where the sound stops being quiet."""
    samples = np.frombuffer(data, "<i2").astype(np.float32)
    size = int(PIECE_S * rate) // 5
    levels = np.sqrt(np.mean(samples[: len(samples) // size * size].reshape(-1, size) ** 2, axis=1))
    return float(np.argmax(levels > QUIET * levels.max()) * size / rate)


def delays_s(said: list[tuple[float, str]], words: list[dict[str, Any]]) -> list[float]:
    """Of each word, from its end in the file to its text; words are those of the file as long as they are equal."""
    times = [(at_s, word) for at_s, delta in said[:-1] for word in delta.split()]
    pairs = zip(times, words, strict=False)
    return [at_s - one["end"] for (at_s, word), one in pairs if word.strip(".,") == one["word"].strip(" .,")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with wave.open(str(args.file)) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    begin_s = first_sound_s(data, rate)
    with serving(args.model, "--served-model-name", "m", "--dtype", "float32") as (_, address):
        asked = {"timestamp_granularities[]": "word"}
        answer = json.loads(ask(address, args.file, "verbose_json", **asked))
        for _ in range(args.repeats):
            said = measure(address, data, rate, args.pace)
            delays = delays_s(said, answer["words"])
            print(f"first text {said[0][0] - begin_s:.2f} s behind the first sound: {said[0][1]!r}")
            print(
                f"  {len(delays)} words, {statistics.median(delays):.2f} s behind their end, {max(delays):.2f} at most"
            )
            print(f"  the end is the file's: {said[-1][1].strip() == answer['text'].strip()}", flush=True)


if __name__ == "__main__":
    main()
