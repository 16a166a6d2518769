"""Encoding of chunks."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.openai.chunks import ChunkEncoder


@given(st.text(), st.text(), st.booleans(), st.dictionaries(st.sampled_from(["usage", "x"]), st.text(), max_size=2))
def test_an_event_is_one_frame_that_json_reads_back(text: str, model: str, has_usage: bool, extra: dict[str, Any]):
    text = text.encode("utf-8", "replace").decode()
    model = model.encode("utf-8", "replace").decode()
    extra = {key: value.encode("utf-8", "replace").decode() for key, value in extra.items()}
    encoded = ChunkEncoder("id", "object", 1, model, has_usage).encode([{"text": text}], extra)
    assert encoded.startswith(b"data: ")
    assert encoded.endswith(b"\n\n")
    assert b"\n" not in encoded[:-2]
    expected = {"id": "id", "object": "object", "created": 1, "model": model, "choices": [{"text": text}], **extra}
    if has_usage:
        expected.setdefault("usage", None)
    assert json.loads(encoded[6:]) == expected


@given(st.text(), st.integers(0, 128), st.booleans())
def test_chunks_written_by_hand_are_those_that_are_encoded(text: str, index: int, has_usage: bool):
    encoder = ChunkEncoder("id", "object", 1, "model", has_usage)
    ending = {"logprobs": None, "finish_reason": None}
    assert encoder.encode_content(index, text) == encoder.encode(
        [{"index": index, "delta": {"content": text}, **ending}]
    )
    assert encoder.encode_text(index, text) == encoder.encode([{"index": index, "text": text, **ending}])
