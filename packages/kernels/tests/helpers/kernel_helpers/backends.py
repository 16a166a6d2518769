"""The backends of an operation that a CPU runs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.testing import native_variants


def cpu_backend(reference: ModuleType, native: ModuleType) -> Any:
    """The fixture `backend` of a module: the operation's reference, then its native code in each variant."""

    @pytest.fixture(params=["reference", *native_variants()])
    def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        if request.param == "reference":
            return reference
        chosen = NativeLibrary(request.param)
        monkeypatch.setattr(native, "require_library", lambda: chosen)
        return native

    return backend
