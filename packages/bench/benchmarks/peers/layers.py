"""Compares the products of GPT-2's feed-forward layers with OpenVINO's, in turns, by processor time of one thread each.

Twelve pairs: 768 to 3,072 with GELU and back, the input added, in bfloat16. OpenVINO has an environment of its own:

    python -m venv /tmp/ov && /tmp/ov/bin/pip install openvino
    python packages/bench/benchmarks/peers/layers.py --peer-python /tmp/ov/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from statistics import median

import torch

from llmstack_kernels.linear import PackedLinear, pack_linear

SIZE, INNER, NUM_PAIRS, MIN_S = 768, 3072, 12, 0.3
ROWS = (1, 8, 32, 128, 900)

PEER = f"""
import json, sys, time
import numpy as np
import openvino as ov
import openvino.opset13 as ops
random = np.random.default_rng(0)
hidden = data = ops.parameter([-1, {SIZE}], np.float32)
def product(inputs, num_outputs, num_inputs):
    weight = (random.standard_normal((num_outputs, num_inputs)) * 0.02).astype(np.float32)
    bias = ops.constant(np.zeros(num_outputs, np.float32))
    return ops.add(ops.matmul(inputs, ops.constant(weight), False, True), bias)
for _ in range({NUM_PAIRS}):
    inner = ops.gelu(product(hidden, {INNER}, {SIZE}), approximation_mode="tanh")
    hidden = ops.add(product(inner, {SIZE}, {INNER}), hidden)
options = {{"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}}
request = ov.Core().compile_model(ov.Model([hidden], [data]), "CPU", options).create_infer_request()
for line in sys.stdin:
    rows, count = json.loads(line)
    inputs = random.standard_normal((rows, {SIZE})).astype(np.float32)
    request.infer([inputs])
    start = time.process_time()
    for _ in range(count):
        request.infer([inputs])
    print((time.process_time() - start) / count, flush=True)
"""


class Peer:
    """OpenVINO in a process of its own."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen([python, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, rows: int, count: int) -> float:
        """Processor seconds of all layers over so many rows."""
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        writer.write(json.dumps([rows, count]) + "\n")
        writer.flush()
        return float(reader.readline())

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def packed_pairs() -> list[tuple[PackedLinear, PackedLinear]]:
    """The layers, packed."""
    generator = torch.Generator().manual_seed(0)

    def packed(num_outputs: int, num_inputs: int) -> PackedLinear:
        weight = torch.randn(num_outputs, num_inputs, generator=generator) * 0.02
        return pack_linear(weight.bfloat16(), torch.zeros(num_outputs, dtype=torch.bfloat16))

    return [(packed(INNER, SIZE), packed(SIZE, INNER)) for _ in range(NUM_PAIRS)]


def run(pairs: list[tuple[PackedLinear, PackedLinear]], rows: int, count: int) -> float:
    """Processor seconds of all layers over so many rows here."""
    inputs = torch.randn(rows, SIZE).bfloat16()
    seconds = 0.0
    for number in range(count + 1):
        start = time.process_time()
        hidden = inputs
        for first, second in pairs:
            hidden = second(first(hidden, "gelu_tanh"), "none", hidden)
        seconds += (time.process_time() - start) if number else 0.0
    return seconds / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of an environment with openvino")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pairs, peer = packed_pairs(), Peer(args.peer_python)
    try:
        with torch.inference_mode():
            for rows in ROWS:
                count = max(1, round(MIN_S / run(pairs, rows, 1)))
                turns = [(run(pairs, rows, count), peer.measure(rows, count)) for _ in range(args.turns)]
                ours, theirs = (1000 * median(turn[side] for turn in turns) for side in (0, 1))
                ratio = median(second / first for first, second in turns)
                print(f"{rows:4} rows: {ours:8.2f} ms here, {theirs:8.2f} there, ratio {ratio:.2f}")
    finally:
        peer.close()


if __name__ == "__main__":
    main()
