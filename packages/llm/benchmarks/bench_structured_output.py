"""What structured output adds to a step: the time of a decode step of constrained rows by that of free ones.

GPT-2's shape with random weights, 32 rows. Such a model would write strings of rare tokens, whose masks are several
times as dear as those of sensible text. So the rows are made to say a text: their masks are computed in full, and then
only the text's next token is left in them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams, StructuredOutputsParams

pytest.importorskip("llmstack_model_runner")
structured_output = pytest.importorskip("llmstack_structured_output")
vocabularies = pytest.importorskip("llmstack_structured_output.vocabulary")

TOKENIZER = Path(os.environ.get("LLMSTACK_BENCH_TOKENIZER", Path(__file__).parents[4] / "shared/models/gpt2"))
EOS = (50_256,)
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "vocab_size": 50_257,
}  # fmt: skip
NUM_ROWS, NUM_PROMPT_TOKENS = 32, 64
LIMITS = {"max_model_len": 512, "max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 4096}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
TEXT = (
    '{"name": "Jane Doe", "age": 42, "tags": ["a tall woman", "friendly", "from Berlin"], '
    '"address": {"street": "12 Main Street, second floor", "zip": "10117"}}'
)
CONSTRAINT = StructuredOutputsParams(json=json.dumps(PERSON))

pytestmark = pytest.mark.skipif(not (TOKENIZER / "tokenizer.json").is_file(), reason="GPT-2's tokenizer is not at hand")


class Prompter(structured_output.ConstrainedRequests):  # type: ignore[misc]  # imported where it is installed
    """Computes masks in full, and leaves one token in each."""

    def __init__(self, tokenizer_path: str, vocab_size: int) -> None:
        super().__init__(tokenizer_path, vocab_size)
        self.token_ids = vocabularies.load_vocabulary(TOKENIZER, vocab_size, EOS).tokenizer.tokenize_str(TEXT)

    def masks(self, rows: Sequence[tuple[str, Sequence[int]]]) -> bytearray:
        bits: bytearray = super().masks(rows)
        for index, (request_id, _) in enumerate(rows):
            token_id = [*self.token_ids, *EOS][self._requests[request_id].matcher.num_tokens]
            place = index * self.mask_bytes
            assert bits[place + token_id // 8] >> token_id % 8 & 1
            bits[place : place + self.mask_bytes] = bytes(self.mask_bytes)
            bits[place + token_id // 8] = 1 << token_id % 8
        return bits


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(json.dumps(GPT2))
    sys.modules["prompter"] = SimpleNamespace(Prompter=Prompter)  # type: ignore[assignment]  # found by name
    config = EngineConfig(
        ModelRunnerConfig(str(folder), dtype="bfloat16", load_format="dummy", device="cpu", **LIMITS),
        scheduler=SchedulerConfig(**LIMITS),
        enable_prefix_caching=False,
        tokenizer_path=str(TOKENIZER),
        constraint_backend="prompter:Prompter",
    )
    return build_engine_core(config)


def step_times(core: EngineCore, temperature: float, constraint: StructuredOutputsParams | None) -> list[list[float]]:
    """Seconds, and seconds of all processors together, of each decode step of all rows."""
    num_tokens = len(vocabularies.load_vocabulary(TOKENIZER, 50_257, EOS).tokenizer.tokenize_str(TEXT))
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=1, structured_outputs=constraint)
    for index in range(NUM_ROWS):
        prompt = [100 + index] * NUM_PROMPT_TOKENS
        core.add_request(EngineCoreRequest(f"{constraint is None}-{index}", prompt, params, EOS))
    times = []
    while core.has_unfinished_requests():
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        if len(core.step().outputs) == NUM_ROWS:
            times.append([time.perf_counter() - start_s, time.process_time() - start_cpu_s])
    return times[1:]  # the first one holds the prompts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bench_a_step_of_constrained_rows(benchmark: BenchmarkFixture, core: EngineCore, temperature: float) -> None:
    free: list[list[float]] = []
    constrained: list[list[float]] = []

    def run_both() -> None:  # interleaved: whatever else the machine does, it does to both
        free.extend(step_times(core, temperature, None))
        constrained.extend(step_times(core, temperature, CONSTRAINT))

    benchmark.pedantic(run_both, rounds=5, warmup_rounds=1)
    for index, name in enumerate(("time", "processor_time")):
        ours, theirs = (statistics.median(step[index] for step in steps) for steps in (constrained, free))
        benchmark.extra_info[f"{name}_ms"] = round(1000 * ours, 2)
        benchmark.extra_info[f"{name}_ratio"] = round(ours / theirs, 3)
    print(benchmark.extra_info)
