"""Compares this engine with llama.cpp on a GGUF file, in turns, by the processor time per token of one thread each.

Time of processors leaves out what other programs take, except for memory and caches; ratios of turns are what to quote.
The peer is that of the npm package `node-llama-cpp`, which has variants of llama.cpp for many processors:

    npm install node-llama-cpp        # in a folder of its own
    python packages/bench/benchmarks/peers/random_gguf.py Q4_0 model.gguf
    python packages/bench/benchmarks/peers/four_bits.py model.gguf --peer FOLDER
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import IO

import torch

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_model_files import resolve_model
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

LIMITS = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 1024}
NUM_OUTPUTS, PROMPT, LONG_PROMPT = 32, 16, 512
SCRIPT = Path(__file__).with_name("llama_cpp_node.mjs")


class Ours:
    """An engine core in this process."""

    def __init__(self, model: Path) -> None:
        started_s = time.thread_time()
        config = ModelRunnerConfig(str(resolve_model(str(model))), device="cpu", pack_cache=False, **LIMITS)
        scheduler = SchedulerConfig(**LIMITS)
        self._core: EngineCore = build_engine_core(
            EngineConfig(config, scheduler=scheduler, num_blocks=1024, enable_prefix_caching=False, snapshot_steps=0)
        )
        self._num_requests = 0
        self.about = f"{time.thread_time() - started_s:.2f} s to load"

    def measure(self, load: str) -> float:
        """Processor milliseconds per token of a load."""
        if load == "prompt of 512":
            self._add(LONG_PROMPT, 1)
            return self._run() / LONG_PROMPT
        num_rows = 1 if load == "one stream" else 8
        for _ in range(num_rows):
            self._add(PROMPT, NUM_OUTPUTS + 1)
        self._core.step()  # the prompts
        return self._run() / (num_rows * NUM_OUTPUTS)

    def _add(self, num_tokens: int, num_outputs: int) -> None:
        self._num_requests += 1
        prompt = [300 + (7919 * self._num_requests + 31 * place) % 30_000 for place in range(num_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
        self._core.add_request(EngineCoreRequest(str(self._num_requests), prompt, params))

    def _run(self) -> float:
        started_s = time.thread_time()
        while self._core.has_unfinished_requests():
            self._core.step()
        return 1e3 * (time.thread_time() - started_s)


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        script = Path(shutil.copy(SCRIPT, folder))  # modules are looked up beside the script
        self._process = subprocess.Popen(
            ["node", script, model.absolute()], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._read_line()

    def measure(self, load: str) -> float:
        """Processor milliseconds per token of a load."""
        print(load, file=_open(self._process.stdin), flush=True)
        return float(self._read_line())

    def close(self) -> None:
        """Ends the process."""
        _open(self._process.stdin).close()
        self._process.wait()

    def _read_line(self) -> str:
        line = _open(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"the peer ended with status {self._process.wait()}")
        return line.strip()


def _open(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise SystemExit("the peer has no pipes")
    return stream


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--peer", type=Path, required=True, help="the folder in which node-llama-cpp was installed")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours, peer = Ours(options.model), Peer(options.model, options.peer)
    print(f"ours: {ours.about}\nllama.cpp: {peer.about}", file=sys.stderr)
    print(f"| {options.model.name}, processor ms per token | ours | llama.cpp | ratio |\n|---|---|---|---|")
    for load in ("one stream", "prompt of 512", "8 at once"):
        for side in (ours, peer):
            side.measure(load)  # warm up
        turns = [(ours.measure(load), peer.measure(load)) for _ in range(options.turns)]
        cells = [*(f"{median(part):.2f}" for part in zip(*turns, strict=True))]
        print(f"| {load} | {' | '.join(cells)} | {median(theirs / own for own, theirs in turns):.2f} |", flush=True)
    peer.close()


if __name__ == "__main__":
    main()
