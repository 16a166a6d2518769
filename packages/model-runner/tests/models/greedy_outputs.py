"""Greedy tokens of the model folders named on the command line, run in a process whose environment names the kernels.

`python greedy_outputs.py DEVICE NUM_TOKENS FOLDER...` prints JSON: for each folder the tokens of both
prompts in float32, and what ran each operation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_BLOCKS = 32


def greedy(folder: str, device: str, num_tokens: int) -> dict[str, object]:
    """The first prompt decodes alone, then beside the second one's prefill, then beside its decodes."""
    max_model_len = num_tokens + 2
    config = ModelRunnerConfig(folder, device=device, max_model_len=max_model_len, block_size=16, dtype="float32")
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    driver = StepDriver(runner, NUM_BLOCKS)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    driver.add("first", [1], params)
    driver.run(num_tokens // 2)
    driver.add("second", [1, *driver.outputs["first"]], params)
    driver.run(num_tokens - num_tokens // 2)
    if driver.errors:
        raise RuntimeError(f"rows failed: {driver.errors}")
    return {**driver.outputs, "backends": dict(runner.backends())}


if __name__ == "__main__":
    _, device, num_tokens, *folders = sys.argv
    print(json.dumps({Path(folder).name: greedy(folder, device, int(num_tokens)) for folder in folders}))
