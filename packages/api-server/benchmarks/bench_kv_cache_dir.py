"""The first token of a long session after a restart: computed, read from `--kv-cache-dir`, and found in memory.

`python bench_kv_cache_dir.py MODEL [--num-tokens 8000]`; each round starts two servers over one new folder. It prints
medians of wall seconds, and the rate at which this process reads and checks the files that the servers wrote.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_start import TIMEOUT_S, get, running
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

POLL_S, QUIET_S = 0.05, 5.0
WRITTEN = "kv_cache_disk_written_bytes_total"
_SESSION_WORDS = ("river", "stone", "lamp", "garden", "letter", "winter", "ship", "market", "song", "bridge")


def main() -> None:
    """Measures and prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num-tokens", type=int, default=8000)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("arguments", nargs="*", help="further arguments of the server, behind --")
    options = parser.parse_args()
    rounds = [
        measure(options.model, options.num_tokens, options.arguments, number) for number in range(options.num_rounds)
    ]
    medians = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
    for name, value in medians.items():
        print(f"{name:<44}{value:14.4f}")
    allowed_s = medians["memory: first token, s"] + medians["read, MB"] / (medians["read and check, MB/s"] / 2)
    print(f"{'allowed: memory + bytes / half the rate, s':<44}{allowed_s:14.4f}")
    print(f"{'computed / read':<44}{medians['computed: first token, s'] / medians['disk: first token, s']:14.1f}")


def measure(model: str, num_tokens: int, arguments: list[str], seed: int) -> dict[str, float]:
    """One round: a server computes a session and ends, the next one reads it."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "cache"
        further = ["--kv-cache-dir", str(folder), "--max-model-len", str(num_tokens + 100), *arguments]
        with served(model, further) as port:
            prompt = session(port, num_tokens, seed)
            computed_s, _ = first_token(port, prompt)
            wait_for_writes(port)
        with served(model, further) as port:
            disk_s, num_cached = first_token(port, prompt)
            memory_s, _ = first_token(port, prompt)
            read_mb = metric(port, "kv_cache_disk_read_bytes_total") / 1e6
        return {
            "tokens read": num_cached, "read, MB": read_mb, "read and check, MB/s": rate(folder),
            "computed: first token, s": computed_s, "disk: first token, s": disk_s,
            "memory: first token, s": memory_s,
        }  # fmt: skip


@contextmanager
def served(model: str, arguments: list[str]) -> Iterator[int]:
    """A server that is ready and idle; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "llmstack_command", "serve", model, "--port", str(port), *arguments]
    with running(command, dict(os.environ)) as process:
        started_s = time.perf_counter()
        while get(port, "/health")[0] != 200:
            if process.poll() is not None or time.perf_counter() - started_s > TIMEOUT_S:
                raise SystemExit(f"the server did not start: {command}")
            time.sleep(POLL_S)
        post(port, "/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        yield port


def wait_for_writes(port: int) -> None:
    """Waits until a server that keeps to its share of the processor writes no more."""
    num_bytes, last = metric(port, WRITTEN), -1.0
    while num_bytes > last:
        time.sleep(QUIET_S)
        num_bytes, last = metric(port, WRITTEN), num_bytes


def session(port: int, num_tokens: int, seed: int) -> list[int]:
    """The tokens of words that no other round has in this order."""
    words = " ".join(_SESSION_WORDS[(seed + place * place) % len(_SESSION_WORDS)] for place in range(2 * num_tokens))
    tokens: list[int] = post(port, "/tokenize", {"prompt": f"{seed} {words}"})["tokens"]
    return tokens[:num_tokens]


def first_token(port: int, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token, and how many of the prompt's were cached."""
    begun_s = time.perf_counter()
    answer = post(port, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    return time.perf_counter() - begun_s, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def post(port: int, path: str, body: dict[str, object]) -> Any:
    """The answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def metric(port: int, name: str) -> float:
    """The value of a counter."""
    found = re.search(rf"^llmstack:{name}{{[^}}]*}} (\S+)$", get(port, "/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def rate(folder: Path) -> float:
    """Megabytes a second at which one thread reads and decrypts files like those in the folder."""
    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    paths = [path for path in folder.iterdir() if path.name != "lock"]
    for path in paths:
        path.write_bytes(cipher.encrypt(nonce, path.read_bytes(), None))
    begun_s = time.perf_counter()
    num_bytes = sum(len(cipher.decrypt(nonce, path.read_bytes(), None)) for path in paths)
    return num_bytes / 1e6 / (time.perf_counter() - begun_s)


if __name__ == "__main__":
    main()
