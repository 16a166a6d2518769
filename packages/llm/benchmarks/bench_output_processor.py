"""The way up: one step of 256 requests."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import EngineCoreOutput, RequestOutputKind

NUM_REQUESTS = 256


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "merged"])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_step(benchmark, kind: RequestOutputKind, is_taken: bool) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    inputs = InputProcessor(ModelConfig("m", Path(), "A", "a", 10**6, 257), tokenizer)
    outputs = OutputProcessor(tokenizer)
    collectors = []
    for index in range(NUM_REQUESTS):
        admitted = inputs.admit("Hello", inputs.check_sampling(GivenSampling({"output_kind": kind})))
        collectors.append(outputs.new_collector(kind))
        outputs.add_request(str(index), admitted, inputs.process_inputs(str(index), admitted), collectors[-1])
    tokens = itertools.cycle(range(33, 120))

    def step() -> None:
        token_id = next(tokens)
        outputs.process_outputs([EngineCoreOutput(str(index), [token_id]) for index in range(NUM_REQUESTS)], 1.0)
        if is_taken:
            for collector in collectors:
                collector.get_nowait()

    benchmark.pedantic(step, rounds=200, warmup_rounds=5)
    benchmark.extra_info["microseconds_per_output"] = 1e6 * benchmark.stats["median"] / NUM_REQUESTS
