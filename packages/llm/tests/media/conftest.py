"""A folder whose tokenizer knows the symbols of pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmstack_llm.testing import FakeEngineCoreClient, byte_tokenizer, write_model_folder
from llmstack_types import EngineReady


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer(("<|endoftext|>", "<image>", "<row>"))
    return write_model_folder(tmp_path / "m", config={"vocab_size": 259}, tokenizer=tokenizer)


@pytest.fixture
async def client() -> FakeEngineCoreClient:
    return FakeEngineCoreClient(EngineReady(64, 16, 128, 259, "float32", "cpu"))
