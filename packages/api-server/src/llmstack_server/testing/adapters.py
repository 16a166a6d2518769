"""LoRA adapters of a fake engine."""

from __future__ import annotations

from pathlib import Path

from llmstack_llm.adapters import AdapterRegistry, OnChange
from llmstack_llm.requests import Adapter


class FakeAdapters:
    """Adapters whose files are read for their digest alone.

    Attributes:
        adapters: The adapters that requests can name.
        use: The adapters of running and of waiting requests.
    """

    def __init__(self) -> None:
        self.adapters = AdapterRegistry(is_enabled=True)
        self.use = list[str](), list[str]()

    async def load_adapter(
        self, name: str, path: str, base_model_name: str | None = None, on_change: OnChange | None = None
    ) -> Adapter:
        """Runs the checks of name and files."""
        self.adapters.check(name, path)
        adapter = self.adapters.identify(name, path, base_model_name)
        self.adapters.add(adapter)
        if on_change is not None:
            await on_change()
        return adapter

    async def unload_adapter(self, name: str, on_change: OnChange | None = None) -> bool:
        is_known = self.adapters.remove(name) is not None
        if is_known and on_change is not None:
            await on_change()
        return is_known

    def adapter_use(self) -> tuple[list[str], list[str]]:
        return self.use


def write_adapter(folder: Path) -> Path:
    """Writes files that stand for an adapter where nothing is computed with it; returns the folder."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder
