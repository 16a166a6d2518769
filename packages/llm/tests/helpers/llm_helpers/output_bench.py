"""An output processor, and engine outputs made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import (
    EngineCoreOutput,
    RequestOutputKind,
    SamplingParams,
)

TOKENIZER = Tokenizer(byte_tokenizer(), {"eos_token": "<|endoftext|>"})


CONFIG = ModelConfig("m", Path(), "GPT2LMHeadModel", "gpt2", 128, 257, eos_token_ids=(256,))


DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Bench:
    """An output processor, and engine outputs made by hand."""

    def __init__(self) -> None:
        self.outputs = OutputProcessor(TOKENIZER)
        self.inputs = InputProcessor(CONFIG, TOKENIZER, clock=lambda: 10.0)
        self.now_s = 10.0
        self.to_abort: list[str] = []

    def add(
        self, request_id: str = "r", prompt: str = "Hi", is_echo: bool = False, is_split: bool = False, **fields: Any
    ) -> RequestOutputCollector:
        sampling = self.inputs.check_params(SamplingParams(**({"max_tokens": 50} | fields)), is_echo=is_echo)
        admitted = self.inputs.admit(prompt, sampling)
        collector = self.outputs.new_collector(admitted.sampling_params.output_kind, is_split=is_split)
        self.outputs.add_request(request_id, admitted, self.inputs.process_inputs(request_id, admitted), collector)
        return collector

    def step(self, *outputs: EngineCoreOutput) -> Any:
        self.now_s += 1.0
        processed = self.outputs.process_outputs(outputs, self.now_s)
        self.to_abort += processed.request_ids_to_abort
        return processed

    def say(self, text: str, request_id: str = "r", **fields: Any) -> Any:
        return self.step(EngineCoreOutput(request_id, TOKENIZER.encode(text), **fields))


def taken(collector: RequestOutputCollector) -> RequestOutput:
    output = collector.get_nowait()
    assert output is not None
    return output
