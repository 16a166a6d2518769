"""The header check on a file of 1,000 tensors, as a ratio to parsing its JSON alone."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from llmstack_model_files import check_safetensors


def bench_check_safetensors(benchmark: Any, tmp_path: Path) -> None:
    header = {
        f"model.layers.{index}.mlp.up_proj.weight": {
            "dtype": "BF16",
            "shape": [4],
            "data_offsets": [8 * index, 8 * index + 8],
        }
        for index in range(1000)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8000))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        json.loads(text)
        times.append(time.perf_counter() - start)
    benchmark(check_safetensors, path)
    benchmark.extra_info["time over parsing the JSON"] = benchmark.stats["median"] / statistics.median(times)
