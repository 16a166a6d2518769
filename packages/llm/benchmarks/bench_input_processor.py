"""The way down: a prompt to an engine request."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.sampling import check_sampling, given_fields
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import SamplingParams

MODELS = Path(__file__).resolve().parents[4] / "shared" / "models"
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, stop=("\n\n",), seed=1)


def processor() -> InputProcessor:
    path = MODELS / "gpt2" / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path)) if path.is_file() else byte_tokenizer()
    return InputProcessor(ModelConfig("m", Path(), "A", "a", 16_384, 50_257), Tokenizer(backend))


@pytest.mark.parametrize("num_words", [8, 100, 700])
def test_text(benchmark, num_words: int) -> None:
    ours, text = processor(), "Once upon a time there was" * (num_words // 6 + 1)
    benchmark(lambda: ours.process_inputs("r", ours.admit(text, ours.check_params(PARAMS))))


@pytest.mark.parametrize("num_tokens", [128, 1024])
def test_token_ids(benchmark, num_tokens: int) -> None:
    ours, token_ids = processor(), list(range(num_tokens))
    benchmark(lambda: ours.process_inputs("r", ours.admit(token_ids, ours.check_params(PARAMS))))


def test_sampling_params_alone(benchmark) -> None:
    limits = AdmissionLimits(16_384, 50_257)
    benchmark(lambda: check_sampling(given_fields(PARAMS), limits))
