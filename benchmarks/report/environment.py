"""What the report ran on, and what was lacking."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import subprocess
from typing import Any

import torch

QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.total,memory.free"
NEEDED = ("llmstack_types", "llmstack_kv_cache", "llmstack_model_files", "llmstack_kernels", "llmstack_model_runner")
USEFUL = ("triton", "transformers", "safetensors", "numpy", "msgpack", "pytest", "flashinfer", "llmstack_engine_core")


def lacking(names: tuple[str, ...]) -> list[str]:
    """Those that cannot be imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def describe_run(device_type: str, *, is_smoke: bool) -> dict[str, Any]:
    """Card, clocks, versions, backends; nothing here fails the report."""
    header: dict[str, Any] = {"smoke": "every figure is meaningless"} if is_smoke else {}
    header["python"] = platform.python_version()
    header["torch"] = torch.__version__
    for name in ("triton", "transformers", "numpy"):
        header[name] = _version(name)
    header["lacking"] = ", ".join(lacking(NEEDED + USEFUL)) or "nothing"
    if device_type == "cuda":
        header |= _card()
    header["backends"] = _backends(device_type)
    return header


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "lacking"


def _card() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2 MB": getattr(properties, "L2_cache_size", 0) >> 20,  # not in every version of PyTorch
        "capability": f"{properties.major}.{properties.minor}",
        "memory free of total GB": f"{free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f}",
        "cuda": torch.version.cuda,
        "nvidia-smi": _nvidia_smi(),
    }


def _nvidia_smi() -> dict[str, str] | str:
    """State of the card, as found; nothing is set."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not at hand ({type(error).__name__})"
    values = done.stdout.splitlines()[0].split(", ") if done.stdout else []
    return dict(zip(QUERY.split(","), values, strict=False))


def _backends(device_type: str) -> dict[str, str] | str:
    try:
        kernels = importlib.import_module("llmstack_kernels")
        found: dict[str, str] = kernels.backends(device_type)
    except Exception as error:  # noqa: BLE001 - a module that cannot be imported is reported here, once
        return f"failed: {type(error).__name__}: {error}"
    return found
