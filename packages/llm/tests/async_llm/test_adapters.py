"""Changes of adapters are known everywhere before an engine core unloads one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_helpers.engines import make

from llmstack_llm.adapters import LOADED, AdapterRegistry
from llmstack_llm.testing import FakeEngineCoreClient
from llmstack_types import Control


async def test_an_adapter_is_unloaded_when_no_process_names_it(
    folder: Path, client: FakeEngineCoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    order: list[str] = []

    async def call(operation: Any, identity: str, *_: str) -> Any:
        order.append(f"{operation.name} {identity.rpartition('.')[2]}")
        return LOADED if operation is Control.LOAD_ADAPTER else True

    async def note() -> None:
        order.append(f"known {[adapter.identity.rpartition('.')[2] for adapter in llm.adapters.adapters]}")

    llm = make(folder, client, adapters=AdapterRegistry(is_enabled=True))
    monkeypatch.setattr(client, "call", call)
    await llm.load_adapter("a", str(tmp_path), on_change=note)
    await llm.load_adapter("a", str(tmp_path), on_change=note)
    assert await llm.unload_adapter("a", note)
    assert not await llm.unload_adapter("a", note)
    assert order == [
        "load_adapter 1",
        "known ['1']",
        "load_adapter 2",
        "known ['2']",
        "unload_adapter 1",
        "known []",
        "unload_adapter 2",
    ]
    await llm.shutdown()
