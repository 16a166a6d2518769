"""Findings about the machine: system, processor, memory and GPUs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from llmstack_command.collect_env.machine import ROOT, cpu_facts, gpu_facts, system_facts
from llmstack_command.collect_env.software import import_facts, start_probe
from llmstack_command.doctor.finding import Finding, package_module

LIMITS_MODULE = "llmstack_model_runner.device.host_limits"
"""What the server itself takes as the limits of this machine."""
CPUS_MODULE = "llmstack_kernels.usable_cpus"
"""What the server takes as the processors that it may use."""
CACHES_MODULE = "llmstack_kernels.caches"
"""What native kernels take as the caches of this processor."""
LEAST_FREE_BYTES = 1 << 30
"""Below this, the server, PyTorch and a small model may not fit beside one another."""


def system() -> Iterator[Finding]:
    """Operating system and interpreter."""
    facts = system_facts()
    text = f"{facts['os']}, {facts['kernel']}, {facts['libc']}, Python {platform.python_version()}"
    if platform.system() == "Linux":
        yield Finding("system", "ok", text)
    else:
        yield Finding("system", "problem", text, "llmstack serves on Linux only")


def processor() -> Iterator[Finding]:
    """Model and number of processors, as far as affinity and quotas let this process use them."""
    facts = cpu_facts()
    cpus = package_module(CPUS_MODULE)
    usable = f"{cpus.num_usable_cpus()} of {os.cpu_count()} usable" if cpus else facts["processors"]
    yield Finding("processor", "ok", f"{facts['model']}; {usable}; {facts['features']}")


def caches() -> Iterator[Finding]:
    """The caches of a core, and what native kernels take at a time to fit them."""
    if module := package_module(CACHES_MODULE):
        yield Finding("caches", "ok", module.describe())


def memory(root: Path = ROOT) -> Iterator[Finding]:
    """Memory that is free for a server, and the limit of the control group where it is lower than the machine's."""
    limits = package_module(LIMITS_MODULE)
    free = limits.available_memory_bytes(root) if limits else None
    if free is None:
        facts = system_facts(root)
        yield Finding("memory", "ok", f"{facts.get('memory available', 'unknown')} free")
        return
    limit = limits.memory_limit_bytes(root) if limits else None
    total = system_facts(root).get("memory", "unknown")
    is_limited = limit is not None and _gib(limit) != total
    text = f"{_gib(free)} free of {_gib(limit or free) if is_limited else total}"
    if is_limited:
        text += f", the limit of the control group (the machine has {total})"
    if free < LEAST_FREE_BYTES:
        yield Finding("memory", "note", text, "end other programs, raise the limit, or lower --kv-cache-memory-bytes")
    else:
        yield Finding("memory", "ok", text)


def torch() -> Iterator[Finding]:
    """The build of PyTorch, read without importing it."""
    build = torch_build()
    if build is None:
        command = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        yield Finding("torch", "problem", "not installed", f"{command} (without a GPU), else pip install torch")
        return
    version, cuda = build
    yield Finding("torch", "ok", f"{version}, {f'for CUDA {cuda}' if cuda else 'for processors alone'}")


def gpu() -> Iterator[Finding]:
    """The GPUs of NVIDIA's driver, and whether PyTorch can use them; only then it is imported."""
    facts = gpu_facts()
    if "nvidia-smi" in facts:
        text = f"none (nvidia-smi: {facts['nvidia-smi']})"
        yield Finding("GPU", "note", text, "only if there is one: install NVIDIA's driver")
        return
    text = "; ".join(facts.values())
    build = torch_build()
    if build is not None and build[1] is None:
        yield Finding(
            "GPU", "note", f"{text}; this build of torch cannot use it", "pip install --force-reinstall torch"
        )
        return
    seen = import_facts(start_probe()).get("torch sees a GPU") if build else None
    if seen == "yes":
        yield Finding("GPU", "ok", text)
    else:
        yield Finding("GPU", "note", f"{text}; torch does not see it", "update NVIDIA's driver, see docs/gpu.md")


def torch_build() -> tuple[str, str | None] | None:
    """Version of the installed PyTorch, and that of CUDA if it is built for it; None where it is not installed."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "of unknown version", None
    values = dict(re.findall(r"^(__version__|cuda)\b[^=]*= '([^']*)'", text, re.MULTILINE))
    return values.get("__version__", "of unknown version"), values.get("cuda")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
