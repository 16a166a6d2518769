"""Facts about the software: Python, packages, PyTorch and environment variables."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping

PROBE_MODULE = "llmstack_command.collect_env.probe"
PROBE_TIMEOUT_S = 30.0
# Third-party packages that decide speed or behaviour.
_PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "llguidance", "jinja2",
    "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "prometheus-client", "pyzmq", "msgpack",
    "openai", "pip",
)  # fmt: skip
_PREFIXES = (
    "LLMSTACK_", "VLLM_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_",
    "TORCH", "PYTORCH_", "TRITON_", "OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "MALLOC_",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHON", "OTEL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|HEADERS", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(set, not shown)"


def python_facts() -> dict[str, str]:
    """Version and location of the interpreter."""
    is_virtual = sys.prefix != sys.base_prefix
    return {
        "version": f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()})",
        "executable": sys.executable,
        "virtual environment": "yes" if is_virtual else "no",
    }


def package_versions() -> dict[str, str]:
    """Name to version of llmstack's packages and of relevant others."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(("llmstack-", "nvidia-")) or name in _PACKAGES:
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def start_probe() -> subprocess.Popen[str] | None:
    """Starts the process that imports PyTorch and the kernels; None if PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    return subprocess.Popen(
        [sys.executable, "-m", PROBE_MODULE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def import_facts(probe: subprocess.Popen[str] | None) -> dict[str, str]:
    """The facts of the probe, or the reason of its failure."""
    if probe is None:
        return {"torch": "not installed"}
    try:
        output, errors = probe.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.communicate()
        return {"torch": f"cannot be imported within {PROBE_TIMEOUT_S:g} s"}
    with contextlib.suppress(ValueError):
        return {str(name): str(value) for name, value in json.loads(output).items()}
    last_line = errors.strip().rpartition("\n")[2] or f"exit code {probe.returncode}"
    return {"torch": f"cannot be imported: {last_line[:300]}"}


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Name to value, sorted; secrets are named, their values are not."""
    names = sorted(name for name in variables if name.upper().startswith(_PREFIXES))
    return {name: _shown(name, variables[name]) for name in names}


def _shown(name: str, value: str) -> str:
    if _SECRET_NAME.search(name) and value:
        return HIDDEN
    return _CREDENTIALS.sub("***@", value)
