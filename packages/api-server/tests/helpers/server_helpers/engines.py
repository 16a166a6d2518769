"""Applications over either kind of engine: a fake one, and the real front end over a fake engine core."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import FakeEngineClient, ready_state


@asynccontextmanager
async def either_engine(kind: str, folder: Path) -> AsyncIterator[Any]:
    """`kind`: `fake` or `async_llm`, which has no request left at the end."""
    if kind == "fake":
        yield build_app(ready_state(FakeEngineClient()))
        return
    model = write_model_folder(folder / "model")
    core = FakeEngineCoreClient()
    engine = AsyncLLM(load_model_config(str(model)), core, load_tokenizer(model))
    yield build_app(ready_state(engine, ready=core.ready))
    assert not core.engine.request_id_to_state
    await engine.shutdown()
