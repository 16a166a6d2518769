"""Facts about what is installed: Python, packages, and what importing PyTorch and the kernels says."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys

PROBE_MODULE = "llmstack_command.collect_env.probe"
PROBE_TIMEOUT_S = 30.0
# Besides our own: what decides how fast things run, and what answers.
_PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "llguidance", "jinja2",
    "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "prometheus-client", "pyzmq", "msgpack",
    "openai", "pip",
)  # fmt: skip


def python_facts() -> dict[str, str]:
    """The interpreter."""
    is_virtual = sys.prefix != sys.base_prefix
    return {
        "version": f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()})",
        "executable": sys.executable,
        "virtual environment": "yes" if is_virtual else "no",
    }


def package_versions() -> dict[str, str]:
    """Name to version: all of ours, and those of others that matter."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(("llmstack-", "nvidia-")) or name in _PACKAGES:
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def start_probe() -> subprocess.Popen[str] | None:
    """Starts the process that imports PyTorch and the kernels; None where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    return subprocess.Popen(
        [sys.executable, "-m", PROBE_MODULE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def import_facts(probe: subprocess.Popen[str] | None) -> dict[str, str]:
    """What the probe found, or why it found nothing."""
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
