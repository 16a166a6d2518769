"""Vectors in place of tokens: what is read, and what is refused by name."""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from typing import Any

import pytest

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.prompt_embeds import PromptEmbeds, read_prompt_embeds
from llmstack_llm.admission.sampling import CheckedSampling
from llmstack_types import InvalidRequestError

LIMITS = AdmissionLimits(8, 100, prompt_embeds_size=4, dtype="float32")
NO_FIELDS = CheckedSampling({})
ROWS = struct.pack("<8f", *range(8))


def file(data: bytes = ROWS, **changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, len(data)]} | changes
    header = json.dumps({"__metadata__": {}, "x": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + data


def read(value: Any, limits: AdmissionLimits = LIMITS, sampling: CheckedSampling = NO_FIELDS) -> PromptEmbeds:
    embeds = read_prompt_embeds({"prompt_embeds": value}, sampling, limits)
    assert embeds is not None
    return embeds


def refusal(value: Any, limits: AdmissionLimits = LIMITS, sampling: CheckedSampling = NO_FIELDS) -> tuple[Any, ...]:
    with pytest.raises(InvalidRequestError) as caught:
        read(value, limits, sampling)
    return caught.value.code, caught.value.param, caught.value.message


def test_a_tensor_is_read_as_bytes_and_as_base64_and_no_two_requests_share_its_prefix():
    assert read_prompt_embeds("text", NO_FIELDS, LIMITS) is None
    assert read_prompt_embeds({"prompt": "text"}, NO_FIELDS, LIMITS) is None
    embeds = read(file())
    assert embeds == PromptEmbeds(ROWS, [0, 0])
    assert embeds == read(base64.b64encode(file()).decode()) == read(file(shape=[1, 2, 4]))
    first, second = embeds.fields(), embeds.fields()
    assert first["prompt_embeds"] == ROWS
    assert first["cache_salt"] != second["cache_salt"]


@pytest.mark.parametrize(
    ("dtype", "name", "layout", "infinity"),
    [("float32", "F32", "<f", 0x7F800000), ("bfloat16", "BF16", "<H", 0x7F80), ("float16", "F16", "<H", 0x7C00)],
)
def test_every_value_is_finite_in_the_type_of_the_model(dtype: str, name: str, layout: str, infinity: int):
    limits = dataclasses.replace(LIMITS, dtype=dtype)
    size = struct.calcsize(layout)
    for number in (infinity, infinity + 1, infinity | 1 << (8 * size - 1)):
        for place in range(8):
            data = bytes(place * size) + number.to_bytes(size, "little") + bytes((7 - place) * size)
            assert refusal(file(data, dtype=name), limits)[2].endswith("the tensor has values that are not finite.")
    for number in (infinity - 1, infinity - 1 | 1 << (8 * size - 1), infinity >> 1):
        assert read(file(8 * number.to_bytes(size, "little"), dtype=name), limits).token_ids == [0, 0]
    other = "BF16" if name != "BF16" else "F16"
    assert f"the model's type is {name}" in refusal(file(bytes(16), dtype=other), limits)[2]


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (7, "invalid_type", "base64"),
        ("%%%", "invalid_value", "not base64"),
        (b"", "invalid_value", "torch.save"),
        (b"PK" + bytes(100), "invalid_value", "torch.save"),
        (struct.pack("<Q", 2) + b"{}", "invalid_value", "one tensor"),
        (struct.pack("<Q", 4) + b"null", "invalid_value", "one tensor"),
        (struct.pack("<Q", 4) + b"nul\xff", "invalid_value", "one tensor"),
        (file(dtype="F64"), "invalid_value", "type"),
        (file(dtype=["F32"]), "invalid_value", "type"),
        (file(shape=[4, 2]), "invalid_value", "number of tokens, 4"),
        (file(shape=[True, 4]), "invalid_value", "number of tokens, 4"),
        (file(shape=[8]), "invalid_value", "number of tokens, 4"),
        (file(shape=[2, 1, 4]), "invalid_value", "number of tokens, 4"),
        (file(shape=[0, 4]), "invalid_value", "no vectors"),
        (file(shape=[-2, 4]), "invalid_value", "no vectors"),
        (file(shape=[3, 4]), "invalid_value", "does not fit"),
        (file(shape=[9, 4]), "context_length_exceeded", "9"),
        (file(data_offsets=[4, 36]), "invalid_value", "does not fit"),
        (file(ROWS + b"x"), "invalid_value", "does not fit"),
    ],
)
def test_what_is_no_tensor_of_the_model_is_refused(value: Any, code: str, words: str):
    found = refusal(value)
    assert found[:2] == (code, "prompt_embeds")
    assert words in found[2]


def test_fields_that_read_tokens_of_the_prompt_are_refused_with_vectors():
    for name, value in (
        ("prompt_logprobs", 1), ("truncate_prompt_tokens", 3), ("use_beam_search", True),
    ):  # fmt: skip
        assert refusal(file(), sampling=CheckedSampling({name: value}))[:2] == ("invalid_value", name)
    assert read(file(), sampling=CheckedSampling({"repetition_penalty": 1.5, "use_beam_search": False})).token_ids
    with pytest.raises(InvalidRequestError, match="either tokens or vectors"):
        read_prompt_embeds({"prompt_embeds": file(), "prompt": "a"}, NO_FIELDS, LIMITS)
    off = dataclasses.replace(LIMITS, prompt_embeds_size=0)
    assert refusal(file(), off)[:2] == ("unsupported_parameter", "prompt_embeds")
