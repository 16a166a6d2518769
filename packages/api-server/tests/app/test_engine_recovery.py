"""Answers over HTTP when the engine core dies, with a real one in a process that echoes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from urllib.parse import quote

from server_helpers.waiting import wait_until

from llmstack_llm import AsyncLLM, EngineArgs, RequestObserver, RequestOutput
from llmstack_llm.testing import write_model_folder
from llmstack_server.app import build_app
from llmstack_server.testing import call, ready_state


class Seen(RequestObserver):
    """Requests of which tokens have come."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()

    def on_output(self, output: RequestOutput) -> None:
        self.request_ids.add(output.request_id)


async def test_requests_end_with_503_where_the_weights_changed_on_disk(tmp_path: Path):
    weights = tmp_path / "weights"
    weights.write_text("these")
    # The options of the runner that echoes are in the name of its folder.
    folder = write_model_folder(tmp_path / f"m?step_delay_s=0.02&weights_file={quote(str(weights), safe='')}")
    runner = "llmstack_engine_core.testing:EchoModelRunner"
    llm = AsyncLLM.from_engine_args(
        EngineArgs(str(folder), runner=runner, num_kv_blocks=32, max_engine_restarts=3, log_level="critical")
    )
    try:
        ready = await llm.wait_until_ready()
        llm.add_observer(seen := Seen())
        app = build_app(ready_state(llm, ready=ready))  # type: ignore[arg-type]  # as `serve` passes it
        body = {"prompt": "Hello", "max_tokens": 100}
        whole = asyncio.create_task(call(app, "POST", "/v1/completions", body))
        stream = asyncio.create_task(call(app, "POST", "/v1/completions", body | {"stream": True}))
        await wait_until(lambda: seen.request_ids)
        weights.write_text("others")
        os.kill(ready.pid, signal.SIGKILL)
        refused, cut = await whole, await stream
        assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert refused.headers["retry-after"] == "1"
        assert cut.status == 200
        assert cut.events()[-1]["error"]["code"] == "engine_unavailable"
        later = await call(app, "POST", "/v1/completions", body | {"max_tokens": 4})
        assert later.json()["choices"][0]["text"] == "Hell"
    finally:
        await llm.shutdown()
