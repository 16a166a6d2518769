"""Vectors in place of tokens: what is read, and what is refused by name."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import struct
from typing import Any

import pytest

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.prompt_embeds import PromptEmbeds, digest_of, read_prompt_embeds
from llmstack_llm.admission.sampling import CheckedSampling
from llmstack_llm.pooling.prompt import num_chars_of
from llmstack_types import InvalidRequestError, MediaItem, MediaMemory

LIMITS = AdmissionLimits(8, 100, prompt_embeds_size=4, max_item_vectors=3, dtype="float32")
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


def item(offset: int, data: bytes, dtype: str = "float32") -> MediaItem:
    digest = digest_of("embeds", dtype, 4, data)
    return MediaItem(digest, "embeds", offset, len(data) // 16, memory=MediaMemory(len(data), data=data))


def test_a_tensor_is_one_item_whether_it_comes_as_bytes_or_as_base64():
    assert read_prompt_embeds("text", NO_FIELDS, LIMITS) is None
    assert read_prompt_embeds({"prompt": "text"}, NO_FIELDS, LIMITS) is None
    embeds = read(file())
    assert embeds == PromptEmbeds(None, [0, 0], (item(0, ROWS),))
    assert embeds == read(base64.b64encode(file()).decode()) == read(file(shape=[1, 2, 4]))
    shown = read_prompt_embeds({"prompt_embeds": file(), "prompt": "Hi"}, NO_FIELDS, LIMITS)
    assert shown == dataclasses.replace(embeds, text="Hi")


def test_long_prompts_are_cut_into_items_that_equal_beginnings_share():
    data = struct.pack("<32f", *range(32))
    embeds = read(file(data, shape=[8, 4], data_offsets=[0, 128]))
    assert embeds.media == (item(0, data[:48]), item(3, data[48:96]), item(6, data[96:]))
    other = read(file(data[:96] + ROWS, shape=[8, 4], data_offsets=[0, 128]))
    assert [one.digest for one in other.media[:2]] == [one.digest for one in embeds.media[:2]]
    assert other.media[2].digest != embeds.media[2].digest


def test_no_two_kinds_types_widths_or_contents_have_the_same_digest():
    parts = [
        ("embeds", "float32", 4, b"11"), ("image", "float32", 4, b"11"), ("embeds", "float16", 4, b"11"),
        ("embeds", "float32", 41, b"1"), ("embeds", "float32", 4, b"1"), ("embedsf", "loat32", 4, b"11"),
    ]  # fmt: skip
    assert len({digest_of(*part) for part in parts}) == len(parts)
    assert len(digest_of(*parts[0])) == 32


def test_tokens_stand_where_the_mask_says_so():
    data = struct.pack("<28f", *range(28))
    prompt: dict[str, Any] = {
        "prompt_embeds": file(data, shape=[7, 4], data_offsets=[0, 112]), "prompt_token_ids": [9, 8, 7, 6, 5, 4, 3],
        "prompt_is_token_ids": [True, False, False, True, True, False, True],
    }  # fmt: skip
    embeds = read_prompt_embeds(prompt, NO_FIELDS, LIMITS)
    assert embeds is not None
    assert embeds.token_ids == [9, 0, 0, 6, 5, 0, 3]
    assert embeds.media == (item(1, data[16:48]), item(5, data[80:96]))
    unused = struct.pack("<f", math.nan) + data[4:]  # the row of a token
    given = {**prompt, "prompt_embeds": file(unused, shape=[7, 4], data_offsets=[0, 112])}
    assert read_prompt_embeds(given, NO_FIELDS, LIMITS) == embeds
    tokens = read_prompt_embeds({**prompt, "prompt_is_token_ids": [True] * 7}, NO_FIELDS, LIMITS)
    assert tokens == PromptEmbeds(None, [9, 8, 7, 6, 5, 4, 3], ())


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt_token_ids": [1, 2]}, "invalid_type", "prompt_is_token_ids"),
        ({"prompt_is_token_ids": [True, False]}, "invalid_type", "prompt_token_ids"),
        ({"prompt_token_ids": [1], "prompt_is_token_ids": [True]}, "invalid_value", "prompt_token_ids"),
        ({"prompt_token_ids": [1, 2], "prompt_is_token_ids": [True]}, "invalid_value", "prompt_is_token_ids"),
        ({"prompt_token_ids": [1, True], "prompt_is_token_ids": [True, False]}, "invalid_type", "prompt_token_ids"),
        ({"prompt_token_ids": [1, 2], "prompt_is_token_ids": [1, 0]}, "invalid_type", "prompt_is_token_ids"),
        ({"prompt_token_ids": [100, 2], "prompt_is_token_ids": [True, False]}, "invalid_value", "prompt_token_ids[0]"),
        ({"prompt": 7}, "invalid_type", "prompt"),
        ({"multi_modal_data": {}}, "unsupported_parameter", "multi_modal_data"),
    ],
)
def test_what_stands_beside_vectors_is_checked_by_name(fields: dict[str, Any], code: str, param: str):
    with pytest.raises(InvalidRequestError) as caught:
        read_prompt_embeds({"prompt_embeds": file(), **fields}, NO_FIELDS, LIMITS)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_tensor_of_pytorch_is_read_in_its_own_type():
    torch = pytest.importorskip("torch")
    rows = torch.arange(8.0).view(2, 4)
    assert read(rows) == read(rows.t().contiguous().t()) == read(rows[None]) == read(file())
    limits = dataclasses.replace(LIMITS, dtype="bfloat16")
    (found,) = read(rows.bfloat16(), limits).media
    assert found.memory == MediaMemory(16, data=rows.bfloat16().view(torch.uint8).numpy().tobytes())
    for wrong in (rows.double(), rows.int(), rows.bfloat16()):
        assert "the model's type is F32" in refusal(wrong)[2]
    assert refusal(torch.empty(0, 4))[2].endswith("the tensor has no vectors.")


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
        ("prompt_logprobs", 1), ("truncate_prompt_tokens", 3),
    ):  # fmt: skip
        assert refusal(file(), sampling=CheckedSampling({name: value}))[:2] == ("invalid_value", name)
    assert read(file(), sampling=CheckedSampling({"repetition_penalty": 1.5, "use_beam_search": True})).token_ids
    off = dataclasses.replace(LIMITS, prompt_embeds_size=0)
    assert refusal(file(), off)[:2] == ("unsupported_parameter", "prompt_embeds")


def test_what_is_to_be_read_of_vectors_is_counted_in_their_bytes():
    torch = pytest.importorskip("torch")
    for value, count in ((file(), len(file())), ("AAAA", 4), (torch.zeros(2, 4), 32), (7, 0)):
        assert num_chars_of({"prompt_embeds": value, "prompt_token_ids": [1, 2], "prompt": "text"}) == count
    assert num_chars_of({"prompt": "text"}) == 4
    assert num_chars_of({"prompt": "text", "prompt_token_ids": [1]}) == 0
