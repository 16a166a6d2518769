"""Front ends of models whose tokenizer has further special tokens, such as those around a gap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, byte_tokenizer, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_types import EngineReady

GAP_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@asynccontextmanager
async def front_end(folder: Path, tokens: list[str]) -> AsyncIterator[tuple[AsyncLLM, FakeEngineCoreClient]]:
    """A front end whose tokenizer has `tokens` besides bytes, and the client of its engine core."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(tokens)
    write_model_folder(folder, tokenizer=tokenizer, config={"vocab_size": 300, "n_positions": 256})
    client = FakeEngineCoreClient(EngineReady(64, 16, 256, 300, "float32", "cpu"))
    llm = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder))
    await llm.wait_until_ready()
    try:
        yield llm, client
    finally:
        await llm.shutdown()
