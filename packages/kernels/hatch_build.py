"""Build hook: compiles the native kernels into the wheel where there is a compiler, and leaves them out where not."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernelsHook(BuildHookInterface[Any]):
    """Runs for wheels and editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Without a compiler the wheel is pure Python: PyTorch code runs instead, and the log says so.

        A wheel carries every variant. An editable installation gets the one that this processor runs.
        """
        if version == "editable" and os.environ.get("LLMSTACK_BUILD_NATIVE") == "no":
            return  # the set-up compiles them at the same time
        builder = _load(Path(self.root, "src", "llmstack_kernels", "build_native.py"))
        names = builder.runnable_variants()[:1] if version == "editable" else list(builder.variants())
        try:
            paths = builder.build(names, report=self.app.display_info)
        except builder.BuildError as error:
            self.app.display_warning(f"native kernels left out: {error}")
            return
        build_data["pure_python"] = False
        # No Python ABI is used: any Python 3 on this platform will do.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] += [
            f"/{path.relative_to(self.root)}" for path in [*paths, *map(builder.digest_path, names)]
        ]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("llmstack_kernels_build_native", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
