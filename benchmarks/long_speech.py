"""Speech of hours through a server: no word lost, no drift of its times, no memory that grows with its length.

python benchmarks/long_speech.py MODEL FOLDER --minutes 1 10 60

`MODEL` is a Whisper folder, such as tiny.en, and `FOLDER` has sound files in English (`jfk.wav`, `two_cities.wav`).
They are joined again and again until the file is long enough. What is said in each alone is what every copy has to say,
in every format. Prints a row for each length, and ends with status 1 where a check fails. An hour takes some minutes
for each format on two processors: `--formats` says which are asked for.

Short sounds come first, until what has a bound is full: encoded windows, keys and values count as memory once they are
written to. So what grows later grows with the length.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from numpy.typing import NDArray

from llmstack_media.sound.samples import sound_samples

RATE = 16_000
FORMATS = ("verbose_json", "json", "text", "srt", "vtt")
START_TIMEOUT_S = 300.0
MIB = 1 << 20
PAUSE_S = 0.5
MAX_DRIFT_S = 0.1
"""Of an hour."""
BAND = 30
"""Words that a text may be behind another one at most, so that it is compared with the same place."""
MAX_CHANGED = 0.02
"""Share of words that are understood otherwise beside another speaker. None is left out, and none is added."""
MAX_RISE_MIB = 48.0
"""From the first length to the last one: Python's own heaps breathe."""
NUM_AT_ONCE, NUM_SHORT, MAX_ROUNDS, STILL_MIB = 8, 16, 8, 2.0
"""Short sounds before the first length: at once, and of a round. The last round adds no more than so much."""
KV_BYTES = 64 << 20
"""Of keys and values: little, since memory counts from the first time that something is written to it."""
Samples = NDArray[np.float32]
_Edits = tuple[int, int, int, int]
"""How many edits, and of each kind."""


def words_of(text: str) -> list[str]:
    """The words of a text, without what is written between them."""
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


def joined(folder: Path) -> Samples:
    """All sound files of a folder, each followed by a pause."""
    parts: list[Samples] = []
    for path in sorted(folder.glob("*.wav")):
        with path.open("rb") as file:
            samples = np.concatenate(list(sound_samples(file, RATE, 3600.0)))
        parts += [0.7 * samples / np.abs(samples).max(), np.zeros(int(PAUSE_S * RATE), np.float32)]
    return np.concatenate(parts)


def write_wav(path: Path, samples: Samples, copies: int = 1) -> None:
    """Writes the samples so many times, one after the other."""
    data = (np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes()
    with wave.open(str(path), "wb") as written:
        written.setparams((1, 2, RATE, 0, "NONE", ""))
        for _ in range(copies):
            written.writeframesraw(data)


@contextmanager
def serving(*words: str) -> Iterator[tuple[psutil.Process, str]]:
    """A server with these options, and its address."""
    command = [sys.executable, "-m", "llmstack_command", "serve", *words, "--port", "0"]
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while "is ready on http://" not in (text := Path(log.name).read_text()):
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the server did not start:\n{text[-2000:]}")
                time.sleep(0.1)
            yield psutil.Process(server.pid), "http://" + text.split("is ready on http://")[1].split()[0]
        finally:
            server.terminate()
            server.wait(60)


def ask(address: str, path: Path, response_format: str, **fields: str) -> str:
    """The answer as it comes."""
    data = {"model": "m", "response_format": response_format, **fields}
    with path.open("rb") as file:
        answer = httpx.post(f"{address}/v1/audio/transcriptions", data=data, files={"file": file}, timeout=None)
    if answer.status_code != 200:
        raise SystemExit(f"{response_format}: {answer.status_code} {answer.text[:500]}")
    return answer.text


def text_of(answer: str, response_format: str) -> str:
    """What is said, out of an answer of any format."""
    if response_format.endswith("json"):
        return str(json.loads(answer)["text"])
    if response_format == "text":
        return answer
    lines = answer.removeprefix("WEBVTT\n").splitlines()
    return " ".join(line for line in lines if "-->" not in line and not line.isdigit())


def changes(expected: list[str], found: list[str]) -> dict[str, int]:
    """Words that are missing, added and understood otherwise: the least edits, within `BAND` words."""
    last: dict[int, _Edits] = {}
    for row in range(len(expected) + 1):
        new: dict[int, _Edits] = {}
        for column in range(max(0, row - BAND), min(len(found), row + BAND) + 1):
            ways = [(0, 0, 0, 0)] if not row and not column else []
            if column and (before := new.get(column - 1)):
                ways.append((before[0] + 1, before[1], before[2] + 1, before[3]))
            if row and (before := last.get(column)):
                ways.append((before[0] + 1, before[1] + 1, before[2], before[3]))
            if row and column and (before := last.get(column - 1)):
                is_other = expected[row - 1] != found[column - 1]
                ways.append((before[0] + is_other, before[1], before[2], before[3] + is_other))
            new[column] = min(ways)
        last = new
    if len(found) not in last:  # far apart
        return {
            "missing": max(0, len(expected) - len(found)),
            "added": max(0, len(found) - len(expected)),
            "changed": 0,
        }
    return dict(zip(("missing", "added", "changed"), last[len(found)][1:], strict=True))


def drift_s(words: list[Mapping[str, Any]], once: list[Mapping[str, Any]], period_s: float) -> float:
    """Seconds that times gain in an hour, beside those of one copy: the slope of a line through all words."""
    places, delays = [], []
    for number in range(int(words[-1]["end"] // period_s) + 1):
        own = [one for one in words if number * period_s <= one["start"] < (number + 1) * period_s]
        texts = [[word["word"].lower() for word in some] for some in (once, own)]
        for block in difflib.SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks():
            for place in range(block.size):
                delay = own[block.b + place]["start"] - number * period_s - once[block.a + place]["start"]
                places.append(own[block.b + place]["start"] / 3600)
                delays.append(delay)
    near = np.abs(np.array(delays) - np.median(delays)) < 0.5  # the others are another word of the same spelling
    return float(np.polyfit(np.array(places)[near], np.array(delays)[near], 1)[0])


def memory_mib(server: psutil.Process) -> dict[str, float]:
    """Memory of each process of a server, in MiB: the one that answers, the engine core, what decodes."""
    found = {}
    for one in [server, *server.children(recursive=True)]:
        name = next((word for word in one.cmdline()[1:] if word.startswith("llmstack") or word == "serve"), "other")
        memory = one.memory_info()  # files that are mapped are the system's
        found[f"{name}-{one.pid}"] = round((memory.rss - memory.shared) / MIB, 1)
    return found


def fill_pools(server: psutil.Process, address: str, unit: Samples) -> None:
    """Short sounds behind long prompts, until memory grows no more."""
    sizes = [sum(memory_mib(server).values())]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_AT_ONCE) as pool:

        def ask_short(number: int) -> None:
            path = Path(folder) / f"{number}.wav"
            write_wav(path, unit[: 2 * RATE] * np.float32(1 - number / 1000))  # each another sound
            ask(address, path, "json", prompt=" ".join(str(1000 * number + place) for place in range(80)))

        for turn in range(MAX_ROUNDS):
            list(pool.map(ask_short, range(turn * NUM_SHORT, (turn + 1) * NUM_SHORT)))
            sizes.append(sum(memory_mib(server).values()))
            if sizes[-1] - sizes[-2] <= STILL_MIB:
                break
    print(f"MiB while pools were filled: {', '.join(f'{size:.0f}' for size in sizes)}", flush=True)


def is_monotone(times: list[tuple[float, float]]) -> bool:
    """Whether segments begin in order, and end behind their beginning."""
    starts = [start for start, _ in times]
    return starts == sorted(starts) and all(start <= end for start, end in times)


def measure(
    server: psutil.Process, address: str, unit: Samples, minutes: float, formats: list[str], keep: Path | None
) -> dict[str, Any]:
    """One length in each format; a row, and what is wrong under `problems`."""
    period_s, problems = len(unit) / RATE, list[str]()
    copies = max(1, round(60 * minutes / period_s))
    row: dict[str, Any] = {"minutes": round(copies * period_s / 60, 1)}
    with tempfile.TemporaryDirectory() as folder:
        alone, path = Path(folder) / "alone.wav", Path(folder) / "joined.wav"
        write_wav(alone, unit)
        write_wav(path, unit, copies)
        once = json.loads(ask(address, alone, "verbose_json", **{"timestamp_granularities[]": "word"}))
        expected = words_of(once["text"]) * copies
        for response_format in formats:
            began_s = time.monotonic()
            given = {"timestamp_granularities[]": "word"} if response_format == "verbose_json" else {}
            answer = ask(address, path, response_format, **given)
            if keep is not None:
                (keep / f"{minutes:g}.{response_format}").write_text(answer)
            row[f"{response_format}_s"] = round(time.monotonic() - began_s, 1)
            found = changes(expected, words_of(text_of(answer, response_format)))
            row[response_format] = found
            if found["missing"] or found["added"] or found["changed"] > MAX_CHANGED * len(expected):
                problems.append(f"{response_format}: {found} of {len(expected)} words")
            if response_format == "verbose_json":
                words = json.loads(answer)["words"]
                if not is_monotone([(one["start"], one["end"]) for one in words]):
                    problems.append("times of words do not grow")
                if minutes >= 5:
                    row["drift_s_per_hour"] = round(drift_s(words, once["words"], period_s), 3)
                    if minutes >= 30 and abs(row["drift_s_per_hour"]) > MAX_DRIFT_S:
                        problems.append("times drift")
    return row | {"mib": memory_mib(server), "problems": problems}


def check_nothing_said(address: str) -> list[str]:
    """Silence and noise, in which nothing is said; what was found in them."""
    random = np.random.default_rng(1)
    silence = np.zeros(40 * RATE, np.float32)
    noise = 0.05 * random.standard_normal(40 * RATE).astype(np.float32)
    hum = 0.1 * np.sin(np.arange(40 * RATE, dtype=np.float32) * np.float32(2 * np.pi * 50 / RATE))
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for name, samples in (("silence", silence), ("noise", noise), ("hum", hum)):
            path = Path(folder) / f"{name}.wav"
            write_wav(path, samples)
            if text := ask(address, path, "text").strip():
                problems.append(f"{name}: {text[:80]!r}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0, 10.0, 60.0])
    parser.add_argument("--keep", type=Path, help="a folder for the answers")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    args = parser.parse_args(arguments)
    unit, problems, rows = joined(args.folder), list[str](), list[dict[str, Any]]()
    options = [args.model, "--served-model-name", "m", "--dtype", "float32", "--max-upload-mb", "512"]
    options += ["--kv-cache-memory-bytes", str(KV_BYTES), "--max-queue-wait", "0"]
    with serving(*options) as (server, address):
        problems += check_nothing_said(address)
        fill_pools(server, address, unit)
        for minutes in args.minutes:
            rows.append(measure(server, address, unit, minutes, args.formats, args.keep))
            problems += rows[-1]["problems"]
            print(json.dumps(rows[-1]), flush=True)
    if len(rows) > 1:
        rises = {name: size - rows[0]["mib"].get(name, size) for name, size in rows[-1]["mib"].items()}
        problems += [f"{name} grew by {rise:.0f} MiB" for name, rise in rises.items() if rise > MAX_RISE_MIB]
    print("\n".join(problems) or "all right")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
