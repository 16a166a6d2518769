"""Compares this server with OpenVINO's and llama.cpp's over HTTP, in turns, and prints a table of ratios.

The peers have environments of their own. `--prepare` writes the models once, 5 GB of random weights:

    python -m venv ov && ov/bin/pip install openvino-genai tokenizers uvicorn numpy
    python -m venv xl && xl/bin/pip install xllamacpp
    python -m venv conv && conv/bin/pip install torch==2.13.0+cpu "optimum-intel==2.2.0" openvino-tokenizers
    python packages/bench/benchmarks/peers/servers.py MODELS --prepare --converter conv/bin/optimum-cli
    python packages/bench/benchmarks/peers/servers.py MODELS --openvino ov/bin/python --llama-cpp xl/bin/python

All rows take less than ten minutes on two cores where nothing else runs. Greedy, exact lengths, no drafts, fresh
prompts, two threads each; a server is suspended while another one is measured. Each is started once before its start
is measured, so that files and bytecode are where an installation has them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmstack_bench.startup import Waiter, free_port, health_status, started_command

HERE = Path(__file__).parent
NAME = "bench"
NO_DRAFTS = '{"method": "none"}'
TIMEOUT_S = 180.0
HEADING = """| tokens per second | ours | peer | ratio | TTFT p99 ms, ours / peer | between tokens p99 ms |
|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one row: how many, tokens of a prompt and of an answer, and how many at once."""

    name: str
    num_requests: int
    prompt: int
    output: int
    at_once: int = 1
    prefix: int = 0

    @property
    def metric(self) -> str:
        """The rate that counts."""
        return "input_throughput" if self.output == 1 else "output_throughput"

    def flags(self) -> list[str]:
        """The load for `bench serve`."""
        values = {
            "num-prompts": self.num_requests, "random-input-len": self.prompt, "random-output-len": self.output,
            "max-concurrency": self.at_once, "random-prefix-len": self.prefix, "num-warmups": min(self.at_once, 8),
        }  # fmt: skip
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


ONE, PROMPT = Load("one stream", 2, 32, 96), Load("prompt of 900", 3, 900, 1)
EIGHT, MANY = Load("8 at once", 16, 128, 64, 8), Load("32 at once", 64, 64, 32, 32)
PREFIX = Load("prefix, 16 at once", 32, 32, 32, 16, prefix=256)
LARGE = (Load("one stream", 1, 32, 64), Load("prompt of 512", 1, 512, 1), Load("8 at once", 8, 32, 32, 8))


@dataclass(frozen=True, slots=True)
class Side:
    """One of our servers: its label, its model within the folder, and its flags."""

    label: str
    model: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """A peer's server, beside ours.

    Attributes:
        peer: `openvino` or `llama.cpp`.
        model: The peer's, within the folder.
    """

    title: str
    peer: str
    model: str
    ours: tuple[Side, ...]
    loads: tuple[Load, ...]
    vocabulary: int


BF16 = ("--dtype", "bfloat16")
LLAMA = "llama-1.1b"
GROUPS = (
    Group("GPT-2's shape", "openvino", "gpt2-openvino", (Side("bfloat16", "gpt2", BF16),),
          (ONE, PROMPT, EIGHT, MANY, PREFIX), 50_257),
    Group("Llama 110M", "openvino", "llama-110m-openvino", (Side("bfloat16", "llama-110m", BF16),),
          (ONE, PROMPT, EIGHT), 32_000),
    Group("Llama 1.1B, Q4_K_M", "llama.cpp", f"{LLAMA}-Q4_K_M.gguf", (Side("the file", f"{LLAMA}-Q4_K_M.gguf"),),
          LARGE, 32_000),
    Group("Llama 1.1B, Q4_0", "llama.cpp", f"{LLAMA}-Q4_0.gguf",
          (Side("int4", LLAMA, ("--quantization", "int4")), Side("the file", f"{LLAMA}-Q4_0.gguf"),
           Side("int4_dynamic", LLAMA, ("--quantization", "int4_dynamic"))), LARGE, 32_000),
    Group("Llama 1.1B, Q8_0", "llama.cpp", f"{LLAMA}-Q8_0.gguf", (Side("int8", LLAMA, ("--quantization", "int8")),),
          LARGE, 32_000),
)  # fmt: skip


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16; where not, OpenVINO computes in float32 and keeps keys in u8."""
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def peer_command(options: argparse.Namespace, group: Group) -> list[str]:
    """The command that serves a peer's model, without its port."""
    model = str(options.folder / group.model)
    if group.peer == "openvino":
        types = ["--precision", "bf16", "--kv", "bf16"] if has_bfloat16() else ["--precision", "f32"]
        return [options.openvino, str(HERE / "openvino_server.py"), model, "--name", NAME, *types]
    places = ["--parallel", "8", "--ctx-size", "8192"]
    return [options.llama_cpp, str(HERE / "llama_cpp_server.py"), model, "--name", NAME, *places]


def own_command(folder: Path, side: Side) -> list[str]:
    """The command that serves a model here, without its port."""
    start = [sys.executable, "-m", "llmstack_command", "serve", str(folder / side.model)]
    memory = ["--kv-cache-memory-bytes", "1G", "--served-model-name", NAME]
    # Each start is a first one.
    return [*start, *memory, "--no-pack-cache", "--speculative-config", NO_DRAFTS, *side.flags]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    label: str
    port: int
    pid: int
    ready_s: float

    def flags(self) -> list[str]:
        """The server for `bench serve`."""
        return [
            "--base-url", f"http://127.0.0.1:{self.port}", "--label", self.label, "--server-pid", str(self.pid)
        ]  # fmt: skip


@contextlib.contextmanager
def running(label: str, command: list[str]) -> Iterator[Running]:
    """The server while the block runs; it is stopped at the end."""
    port = free_port()
    started_s = time.perf_counter()
    with tempfile.TemporaryFile() as log, started_command([*command, "--port", str(port)], log, 20.0) as process:
        wait = Waiter(process, log, started_s, TIMEOUT_S)
        ready_s = wait.until(lambda: health_status(port, "/health") == 200, f"{label} answers")
        yield Running(label, port, process.pid, ready_s)


def start(stack: contextlib.ExitStack, label: str, command: list[str]) -> Running:
    """A server that runs until the stack ends. One before it has filled the page cache and written bytecode."""
    with running(label, command):
        pass
    return stack.enter_context(running(label, command))


def measure(servers: Sequence[Running], load: Load, vocabulary: int, options: argparse.Namespace) -> list[Any]:
    """What `bench serve` reports of each server; ratios are those to the first one."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "llmstack_command", "bench", "serve", "--model", NAME, "--disable-tqdm",
                   "--repetitions", str(options.repetitions), "--seed", str(random.SystemRandom().randrange(1 << 30)),
                   "--vocab-size", str(vocabulary), "--output-json", file.name, *load.flags()]  # fmt: skip
        for server in servers:
            command += server.flags()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return list(json.loads(Path(file.name).read_text(encoding="utf-8"))["servers"])


def check_lengths(found: Sequence[Any], load: Load) -> None:
    """Raises SystemExit where a server has not generated what was asked for."""
    asked = load.num_requests * load.output
    for server in found:
        made = server["median"]["total_output_tokens"]
        if made != asked:
            raise SystemExit(f"{server['label']} has made {made} tokens, not {asked}")


def print_rows(group: Group, load: Load, found: Sequence[Any]) -> None:
    """A row for each of our servers. Of several streams the longest waits count too."""
    peer, *ours = found
    for server in ours:
        own, other, ratio = server["median"], peer["median"], server["ratio_to_first"]
        cells = [f"{own[load.metric]:.1f}", f"{other[load.metric]:.1f}", f"**{ratio[load.metric]:.2f}**"]
        cells += [f"{own['p99_ttft_ms']:.0f} / {other['p99_ttft_ms']:.0f}"]
        cells += [f"{own['p99_itl_ms']:.0f} / {other['p99_itl_ms']:.0f}" if load.output > 1 else ""]
        title = f"{group.title}, {server['label']}: {load.name} ({load.prefix + load.prompt} + {load.output})"
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


def run_group(group: Group, options: argparse.Namespace) -> None:
    """All rows of one peer's model."""
    with contextlib.ExitStack() as stack:
        peer = start(stack, group.peer, peer_command(options, group))
        servers = [peer]
        servers += [start(stack, side.label, own_command(options.folder, side)) for side in group.ours]
        for server in servers[1:]:
            cells = f"{server.ready_s:.2f} | {peer.ready_s:.2f} | **{peer.ready_s / server.ready_s:.2f}** | | |"
            print(f"| {group.title}, {server.label}: first start, seconds to ready | {cells}", flush=True)
        for load in group.loads:
            if options.only in f"{group.title}: {load.name}":
                found = measure(servers, load, group.vocabulary, options)
                check_lengths(found, load)
                print_rows(group, load, found)


def prepare(folder: Path, converter: str) -> None:
    """Writes the models that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for shape in ("gpt2", "llama-110m", LLAMA):
        if not (folder / shape).exists():
            subprocess.run([sys.executable, HERE / "random_checkpoints.py", shape, folder / shape], check=True)
    for shape in ("gpt2", "llama-110m"):
        target = folder / f"{shape}-openvino"
        if not target.exists():
            task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
            subprocess.run([converter, "export", "openvino", "--model", folder / shape, *task, target], check=True)
    for kind in ("Q8_0", "Q4_0", "Q4_K_M"):
        file = folder / f"{LLAMA}-{kind}.gguf"
        if not file.exists():
            subprocess.run([sys.executable, HERE / "random_gguf.py", kind, file], check=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the models")
    parser.add_argument("--prepare", action="store_true", help="write the models, and measure nothing")
    parser.add_argument("--converter", default="optimum-cli", help="of models for OpenVINO (default: that on the path)")
    parser.add_argument("--openvino", help="Python of an environment with openvino-genai; without it no rows of it")
    parser.add_argument("--llama-cpp", help="Python of an environment with xllamacpp; without it no rows of it")
    parser.add_argument("--only", default="", help="rows whose title has this text, such as 'GPT-2' or ': one stream'")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each row (default: 3)")
    options = parser.parse_args()
    if options.prepare:
        return prepare(options.folder, options.converter)
    started_s = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with the script
    os.environ.pop("OMP_NUM_THREADS", None)  # each server has a thread per core
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has bytecode; compiling takes longer than a start
    print(HEADING, flush=True)
    for group in GROUPS:
        has_peer = options.openvino if group.peer == "openvino" else options.llama_cpp
        if has_peer and any(options.only in f"{group.title}: {load.name}" for load in group.loads):
            run_group(group, options)
    print(f"{time.perf_counter() - started_s:.0f} s in all", file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
