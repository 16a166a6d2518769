"""Vectors in place of pictures, by the processor of each family."""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media.parts import MediaPart
from llmstack_llm.media.served import make_served_media
from llmstack_types import InvalidRequestError

LIMITS = AdmissionLimits(128, 300, prompt_embeds_size=2, max_item_vectors=64, dtype="float32")
IDEFICS: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 128},
    "max_image_size": {"longest_edge": 64},
}  # fmt: skip
PIXTRAL: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 16,
}  # fmt: skip
CONFIG = {"vision_config": {"patch_size": 16, "image_size": 64}}


def vectors(num_vectors: int = 3) -> bytes:
    """A safetensors file."""
    data = array("f", range(2 * num_vectors)).tobytes()
    header = {"a": {"dtype": "F32", "shape": [num_vectors, 2], "data_offsets": [0, len(data)]}}
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + data


async def opened(
    folder: Path, preprocessor: dict[str, Any], num_vectors: int = 3, *, takes_vectors: bool = True,
    is_atomic: bool = False,
) -> Any:  # fmt: skip
    for name, content in (("preprocessor_config", preprocessor), ("config", CONFIG), ("processor_config", {})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    options = MediaOptions(takes_vectors=takes_vectors)
    media = make_served_media(folder, options, LIMITS, is_atomic=is_atomic)
    (found,) = await media.open_all([MediaPart("image", "", param="content[0]", vectors=vectors(num_vectors))], "")
    return found


async def test_they_stand_where_a_picture_in_one_piece_would(tmp_path: Path) -> None:
    found = await opened(tmp_path, IDEFICS)
    assert [count for _, count in found.pieces] == [0, 3, 0]
    item = (await found.prepare()).item(5, 3, ((0, 3),))
    assert (item.kind, item.num_units, item.num_vectors, item.memory.num_bytes) == ("embeds", 0, 3, 24)
    found.release()
    found.close()


@pytest.mark.parametrize(("preprocessor", "options", "param", "text"), [
    ({"image_processor_type": "Qwen2VLImageProcessor"}, {}, "content[0].type", "more of a picture"),
    (PIXTRAL, {}, "content[0].type", "more of a picture"),
    (IDEFICS, {"is_atomic": True}, "content[0].type", "more of a picture"),
    (IDEFICS, {"takes_vectors": False}, "content[0].type", "--enable-mm-embeds"),
    (IDEFICS, {"num_vectors": 65}, "content[0].image_embeds", "more than 64 vectors"),
])  # fmt: skip
async def test_what_cannot_be_given_is_refused_by_name(
    tmp_path: Path, preprocessor: dict[str, Any], options: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        await opened(tmp_path, preprocessor, **options)
    assert caught.value.param == param


async def test_more_vectors_than_the_context_has_places_are_refused_by_headers(tmp_path: Path) -> None:
    for name, content in (("preprocessor_config", IDEFICS), ("config", CONFIG), ("processor_config", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    options = MediaOptions(takes_vectors=True, allowed_domains=("absent.example",))
    media = make_served_media(tmp_path, options, LIMITS, is_atomic=False)
    parts = [MediaPart("image", "", param=f"content[{index}]", vectors=vectors(50)) for index in range(3)]
    assert len(await media.open_all(parts[:2], "")) == 2
    absent = MediaPart("image", "http://absent.example/", param="content[3]")
    for all_parts in (parts, [absent, *parts]):
        with pytest.raises(InvalidRequestError, match="150 tokens or more") as caught:
            await media.open_all(all_parts, "")
        assert (caught.value.param, caught.value.code) == ("content[2]", "context_length_exceeded")
    inline = dataclasses.replace(absent, url=white_png(64, 64), param="content[0]")
    with pytest.raises(InvalidRequestError, match="maximum context length is 128") as caught:
        await media.open_all([absent, inline], "")
    assert (caught.value.param, caught.value.code) == ("content[0]", "context_length_exceeded")
    assert (media.stats.num_queries, media.stats.fetch_results) == (0, {"ok": 1}), "nothing is decoded or fetched"
    await media.shutdown()


def white_png(width: int, height: int) -> str:
    """A picture as a URL."""
    rows = zlib.compress((b"\0" + b"\xff" * width) * height)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    packed = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
              for name, data in chunks]  # fmt: skip
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(packed)).decode()
