"""Weights rounded on loading, from the flag to the text, and what the server says of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantized_demo import write_quantized_demo

from llmstack_demo_model import model_path
from llmstack_llm import LLM, SamplingParams
from llmstack_llm.model.config import ModelConfigError

TEXT = "Once upon a time there was a king who had three sons. The youngest went into the forest and met an old woman."
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=1.0)


def prompt_logprobs(llm: LLM) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(TEXT, params, use_tqdm=False)
    token_ids, entries = output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:]
    found = [entry[token_id].logprob for token_id, entry in zip(token_ids, entries, strict=True) if entry]
    assert len(found) == len(token_ids)
    return found


def mean_logprob(llm: LLM) -> float:
    found = prompt_logprobs(llm)
    return math.fsum(found) / len(found)


def test_the_finer_the_integers_the_closer_the_model() -> None:
    found = {}
    for scheme in (None, "int8", "int4"):
        with LLM(str(model_path()), quantization=scheme, num_kv_blocks=64) as llm:
            found[scheme] = prompt_logprobs(llm)
    distances = {}
    for scheme in ("int8", "int4"):
        pairs = zip(found[scheme], found[None], strict=True)
        distances[scheme] = math.fsum(abs(one - other) for one, other in pairs) / len(found[None])
    assert 0 < distances["int8"] < distances["int4"] < 0.5


def test_a_quantized_checkpoint_is_served_as_it_stands(tmp_path: Path) -> None:
    folder = write_quantized_demo(tmp_path / "model")
    with LLM(str(model_path()), num_kv_blocks=64) as full, LLM(str(folder), num_kv_blocks=64) as quantized:
        assert 0 < abs(mean_logprob(full) - mean_logprob(quantized)) < 0.05
    with pytest.raises(ModelConfigError, match=r"quantized already \(by compressed-tensors\)"):
        LLM(str(folder), quantization="int4")


def token_ids_of(llm: LLM, prompts: list[str]) -> list[Any]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_batching_chunks_prefixes_and_preemption_change_no_token(scheme: str) -> None:
    prompts = [TEXT[: 20 + 15 * index] for index in range(5)]
    texts = []
    for options in ({"num_kv_blocks": 256}, {"num_kv_blocks": 16, "max_num_batched_tokens": 8, "max_num_seqs": 5}):
        limits: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "quantization": scheme, **options}
        with LLM(str(model_path()), **limits) as llm:
            texts += [token_ids_of(llm, prompts) for _ in range(2)]  # the second time, prefixes are found
            texts.append([token_ids_of(llm, [prompt])[0] for prompt in prompts])
    assert all(found == texts[0] for found in texts)


def test_a_server_quantizes_by_its_flag_and_says_so(serve: Callable[..., Any]) -> None:
    with serve("--quantization", "int4") as server:
        info = server.get_json("/server_info")
        assert info["config"]["quantization"] == "int4"
        assert info["engine"]["backends"]["quantization"].startswith("int4")
        assert "quantization: int4" in server.log
        status, answer, _ = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 5, "temperature": 0})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)


def test_a_checkpoint_that_is_quantized_already_ends_the_start_in_a_sentence(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_path(), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    )
    server = launch(str(folder), "--quantization", "int8")
    assert server.process.wait(60) != 0
    assert "quantized already (by awq)" in server.log
    assert "Traceback" not in server.log
