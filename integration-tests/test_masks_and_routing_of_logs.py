"""Masks of constraints and choices of experts are computed from a step log, as they were at the time."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmstack_demo_model import model_path
from llmstack_llm import LLM
from llmstack_llm.testing import END_OF_TEXT, byte_tokenizer
from llmstack_model_runner.layers.routing_records import recorded_routing
from llmstack_model_runner.testing import write_random_weights
from llmstack_server.commands.logprobs import LogprobsError, Wanted, answer_of_log, recompute
from llmstack_structured_output import ConstrainedRequests
from llmstack_types import SamplingParams, StructuredOutputsParams

PROMPTS = ["Once upon a time", "The dog"]
CONSTRAINTS = [
    StructuredOutputsParams(regex="[a-f]{3,9}( [0-9]+)?"),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
]
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 257, "hidden_size": 64,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "eos_token_id": 256, "bos_token_id": 256, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def request_ids_of(log: Path) -> list[str]:
    from llmstack_insight.rerun.recorded import requests_of_log
    from llmstack_step_log import read_step_log

    return [one.request.request_id for one in requests_of_log(read_step_log(log)).requests]


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"min_tokens": 6}], ids=str)
def test_masks_are_those_that_the_sampler_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    log, had = tmp_path / "steps.log", {}
    compute = ConstrainedRequests.masks

    def noted(self: ConstrainedRequests, rows: Any) -> bytearray:
        bits = compute(self, rows)
        for place, (request_id, _) in enumerate(rows):
            had.setdefault(request_id, []).append(bytes(bits[place * self.mask_bytes : (place + 1) * self.mask_bytes]))
        return bits

    monkeypatch.setattr(ConstrainedRequests, "masks", noted)
    params = [
        SamplingParams(max_tokens=12, seed=4, structured_outputs=constraint, **fields) for constraint in CONSTRAINTS
    ]
    with LLM(str(model_path()), record_steps=str(log)) as llm:
        llm.generate(PROMPTS, params)
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    monkeypatch.setattr(ConstrainedRequests, "masks", compute)
    *constrained, free = request_ids_of(log)
    assert set(constrained) == set(had)
    for name in constrained:
        header, parts = answer_of_log(log, name)
        (part,) = recompute(header, parts, str(model_path()), Wanted(has_masks=True))
        masks = [b64decode(place["mask"]) for place in part["tokens"]]
        assert masks == had[name]
        allowed = np.unpackbits(np.frombuffer(masks[0], np.uint8), bitorder="little")
        assert 0 < allowed.sum() < len(allowed)
        assert allowed[part["tokens"][0]["token_id"]] == 1
    header, parts = answer_of_log(log, free)
    with pytest.raises(LogprobsError, match="no constraint restricted its tokens"):
        recompute(header, parts, str(model_path()), Wanted(has_masks=True))
    with pytest.raises(LogprobsError, match="no layers of experts"):
        recompute(header, parts, str(model_path()), Wanted(has_routing=True))


def write_experts(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}))
    return write_random_weights(folder, seed=3)


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_routing_is_that_of_the_answer(tmp_path: Path, max_tokens: int) -> None:
    folder, log = write_experts(tmp_path / "m"), tmp_path / "steps.log"
    prompt = list(range(1, 30))
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=2, ignore_eos=True)
    settings = {"dtype": "float32", "max_model_len": 128}
    with (
        LLM(
            str(folder), record_steps=str(log), max_num_batched_tokens=11, enable_prefix_caching=False, **settings
        ) as llm,
        recorded_routing() as had,
    ):
        llm.generate([{"prompt_token_ids": prompt}], params)
    header, parts = answer_of_log(log, request_ids_of(log)[0])
    (part,) = recompute(header, parts, str(folder), Wanted(has_routing=True), settings=settings)
    routing = part["routing"]
    assert routing["layers"] == list(had)
    num_tokens = len(prompt) + max_tokens - 1
    assert (routing["num_tokens"], routing["num_choices"], len(routing["layers"])) == (num_tokens, 2, 2)
    found = np.array(array("H", b64decode(routing["expert_ids"]))).reshape(num_tokens, 2, 2)
    for layer, steps in enumerate(had.values()):
        rows = np.concatenate([step.numpy() for step in steps])
        computed = len(rows)  # the last layer leaves out what no token depends on
        assert computed >= max_tokens
        if layer == 0:
            assert (found[:, layer] == rows).all()
        else:
            assert (found[num_tokens - max_tokens :, layer] == rows[computed - max_tokens :]).all()
    assert len({tuple(one) for one in found.reshape(-1, 2).tolist()}) > 2
    assert len(part["tokens"]) == max_tokens
