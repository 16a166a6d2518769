"""Seconds of Whisper here and in a peer, with equal weights, in turns: one file alone, and many at once.

python benchmarks/speech_peer.py MODEL PEER_MODEL FILE.wav --peer-python ENVIRONMENT/bin/python

`MODEL` is a folder in the form of transformers, `PEER_MODEL` the same weights in the peer's form: for faster-whisper a
folder of CTranslate2, for whisper.cpp the file that `benchmarks/whisper_cpp.py` writes. The sound has 16 kHz and at
most 30 seconds. The peer runs in an environment of its own with `faster-whisper` or `pywhispercpp`. Processor seconds
are those of all threads: on a busy machine they tell more than the clock. Each copy of the file has another loudness,
so that none is found. All sides predict times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import wave
from typing import Any

import numpy as np

from llmstack_llm import LLM, SamplingParams

FASTER_WHISPER = """
from faster_whisper import WhisperModel
model = WhisperModel(options["model"], device="cpu", compute_type=options["type"], cpu_threads=options["threads"])
def transcribe(samples):
    segments, _ = model.transcribe(
        samples, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False
    )
    return "".join(segment.text for segment in segments)
"""
WHISPER_CPP = """
from pywhispercpp.model import Model
model = Model(options["model"], n_threads=options["threads"], redirect_whispercpp_logs_to=None)
def transcribe(samples):
    segments = model.transcribe(
        samples, language="en", temperature_inc=0.0, greedy={"best_of": 1}, print_progress=False
    )
    return " ".join(segment.text for segment in segments)
"""
PEERS = {"faster-whisper": FASTER_WHISPER, "whisper.cpp": WHISPER_CPP}
BEFORE = "import json, sys, time; import numpy as np; options = json.loads(sys.argv[1])"
TURNS = """
for line in sys.stdin:
    path, gains = json.loads(line)
    samples = np.load(path)
    wall, processor = time.perf_counter(), time.process_time()
    texts = [transcribe(samples * np.float32(gain)) for gain in gains]
    print(json.dumps([time.perf_counter() - wall, time.process_time() - processor, texts]), flush=True)
"""


class Peer:
    """A process of the peer, which transcribes one copy of the file after the other."""

    def __init__(self, python: str, name: str, options: dict[str, Any]) -> None:
        command = [python, "-c", "\n".join([BEFORE, PEERS[name], TURNS]), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, path: str, gains: list[float]) -> list[Any]:
        """Wall seconds, processor seconds and texts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([path, gains]) + "\n")
        self._process.stdin.flush()
        found: list[Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def run_ours(llm: LLM, samples: Any, gains: list[float]) -> list[Any]:
    """The same here, with all copies in one call."""
    speech = llm.llm_engine.input_processor.media.speech
    assert speech is not None
    begin = speech.start_ids("en")
    asked = [
        {"prompt_token_ids": begin, "multi_modal_data": {"audio": (samples * np.float32(gain), 16_000)}}
        for gain in gains
    ]
    wall, processor = time.perf_counter(), time.process_time()
    outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=224), use_tqdm=False)
    return [time.perf_counter() - wall, time.process_time() - processor, [one.outputs[0].text for one in outputs]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "peer_model", "file"):
        parser.add_argument(name)
    parser.add_argument("--peer", choices=PEERS, default="faster-whisper")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--compute-type", default="float32", help="of faster-whisper")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copies", type=int, default=16)
    args = parser.parse_args()
    with wave.open(args.file) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16).astype(np.float32) / 32768
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/samples.npy"
        np.save(path, samples)
        compare(args, samples, path)


def compare(args: argparse.Namespace, samples: Any, path: str) -> None:
    """Runs both in turns, and prints medians."""
    options = {"model": args.peer_model, "type": args.compute_type, "threads": args.threads}
    peer = Peer(args.peer_python, args.peer, options)
    with LLM(args.model, dtype=args.dtype, quantization=args.quantization) as llm:
        turn = 0
        for count in (1, args.copies):
            rows: list[tuple[list[Any], list[Any]]] = []
            for _ in range(args.repeats + 1):
                turn += 1
                gains = [1.0 - turn / 1000 - copy / 100_000 for copy in range(count)]
                rows.append((run_ours(llm, samples, gains), peer.run(path, gains)))
            for place, clock in enumerate(("wall", "processor")):
                ours, theirs = (statistics.median(row[side][place] for row in rows[1:]) for side in (0, 1))
                print(f"{count} at once, {clock}: {ours:.2f} s here, {theirs:.2f} s there, ratio {theirs / ours:.2f}")
            print(f"  here {rows[-1][0][2][0]!r}\n  there {rows[-1][1][2][0]!r}")
    peer.close()


if __name__ == "__main__":
    main()
