"""What a script passes by mistake is refused by name, and threads take their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from llmstack_llm import LLM, SamplingParams
from llmstack_llm.engine_args import EngineArgsError
from llmstack_llm.testing import write_model_folder
from llmstack_types import InvalidRequestError

ECHO: dict[str, Any] = {"runner": "llmstack_engine_core.testing:EchoModelRunner", "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(write_model_folder(tmp_path_factory.mktemp("m"))), **ECHO) as made:
        yield made


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"max_tokens": 3}, "'sampling_params': expected SamplingParams or a list of them, but got an object"),
        ("greedy", "'sampling_params': expected SamplingParams or a list of them, but got a string"),
        ([SamplingParams(), {"n": 2}], r"'sampling_params\[1\]': expected SamplingParams, but got an object"),
        ([SamplingParams()], "1 sampling parameters for 2 prompts"),
        (SamplingParams(structured_outputs={"json": {}}), "'structured_outputs': expected StructuredOutputsParams"),
    ],
)
def test_what_are_no_sampling_parameters_is_refused_by_its_place(llm: LLM, params: Any, named: str):
    with pytest.raises(InvalidRequestError, match=named):
        llm.generate(["a", "b"], params, use_tqdm=False)


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), {1, 2}])
def test_bytes_and_other_types_are_no_prompt_and_are_named(llm: LLM, prompt: Any):
    with pytest.raises(InvalidRequestError, match=f"a value of type {type(prompt).__name__}"):
        llm.generate(prompt, use_tqdm=False)


@pytest.mark.parametrize("adapter", ["style", ["style"], {"name": "style"}, 5])
def test_what_is_no_lora_request_is_refused(llm: LLM, adapter: Any):
    with pytest.raises(InvalidRequestError, match="'lora_request': expected LoRARequest"):
        llm.generate(["a"], use_tqdm=False, lora_request=adapter)


def test_the_nearest_option_of_a_mistyped_one_is_named():
    with pytest.raises(EngineArgsError, match=r"max_num_seq \(did you mean max_num_seqs\?\), zzz$"):
        LLM("m", max_num_seq=4, zzz=1)


def test_calls_of_several_threads_run_one_after_the_other(llm: LLM):
    texts: list[str] = []

    def generate() -> None:
        texts.append(llm.generate("cd", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text)

    other = threading.Thread(target=generate)

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            other.start()
            other.join(0.3)
            texts.append("first")
            return super().update(n)

    (output,) = llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=Bar)
    other.join(60)
    assert (output.outputs[0].text, texts) == ("ab", ["first", "cd"])
