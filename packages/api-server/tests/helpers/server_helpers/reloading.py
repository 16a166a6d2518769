"""A server over an engine core that can be exchanged, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from llmstack_llm import AsyncLLM, EngineArgs, RequestObserver, RequestOutput
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.testing import ready_state

RUNNER = "llmstack_engine_core.testing:EchoModelRunner"


class Seen(RequestObserver):
    """Requests of which tokens have come."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()

    def on_output(self, output: RequestOutput) -> None:
        self.request_ids.add(output.request_id)


@contextlib.asynccontextmanager
async def serving(folder: Path, *texts: str, receipts: Any = None) -> AsyncIterator[tuple[Any, AsyncLLM]]:
    """The application and its engine; `texts` are entries of `--reload-models`, `receipts` signs answers."""
    args = EngineArgs(
        str(folder),
        runner=RUNNER,
        num_kv_blocks=32,
        max_engine_restarts=3,
        log_level="critical",
        can_reload=True,
        enable_lora=True,
    )
    llm = AsyncLLM.from_engine_args(args)
    try:
        ready = await llm.wait_until_ready()
        state = ready_state(llm, HTTPConfig(enable_control_routes=True), ready=ready)  # type: ignore[arg-type]
        state.config = dataclasses.replace(state.config, engine=args, reload=ReloadOptions(reload_models=texts))
        app = build_app(state)
        state.receipts = receipts
        yield app, llm
    finally:
        await llm.shutdown()
