"""Choice of the backend that runs each operation on each kind of device.

The environment variable `LLMSTACK_KERNELS` forces a choice: `reference` for all operations, or a list such as
`paged_attention=reference,linear=reference`. The name of a native variant (`avx2`, `portable`, …) forces that variant
instead of the best one that the processor can run. It is read once per operation and device, at the first call.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType

import torch

from llmstack_kernels import caches, launch

REFERENCE = "reference"
NATIVE = "native"
TRITON = "triton"
ENVIRONMENT_VARIABLE = "LLMSTACK_KERNELS"

# Operation to device type to backends beside the reference, best first. A backend is a module of the folder;
# one that is neither native nor Triton's has an `is_available()`. Every operation has a reference, which runs anywhere.
# Triton runs on a CPU only when it is forced, in its interpreter.
_NATIVE_AND_TRITON: Mapping[str, tuple[str, ...]] = {"cpu": (NATIVE,), "cuda": (TRITON,)}
_BACKENDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "activation", "argmax", "bidirectional_attention", "causal_convolution", "embedding", "gated_delta_rule",
            "layer_norm", "low_rank", "reshape_and_cache", "rms_norm", "rotary_embedding", "selective_scan",
            "state_space_scan", "token_bitmask",
        ),
        _NATIVE_AND_TRITON,
    ),
    "decode_inputs": {"cuda": (TRITON,)},
    "draw_tokens": {"cpu": (NATIVE,)},
    "grouped_linear": {"cuda": (TRITON,)},
    "key_selection": {"cpu": (NATIVE,)},
    "linear": {"cpu": (NATIVE, "cpu"), "cuda": (TRITON,)},
    "paged_attention": {"cpu": (NATIVE, "cpu"), "cuda": (TRITON,)},
    "rotary_and_cache": {"cpu": ("composed",), "cuda": (TRITON,)},
    "sample_tokens": {"cuda": (TRITON,)},
}  # fmt: skip

# Backends whose code one module runs for all operations: it has their `is_available` and `describe`.
_RUNTIMES: Mapping[str, str] = {NATIVE: "native", TRITON: "launch"}

# Operations whose reference is a module of their folder; those of all others are in `llmstack_kernels.reference`.
_OWN_REFERENCES = frozenset(
    {
        "bidirectional_attention",
        "causal_convolution",
        "decode_inputs",
        "draw_tokens",
        "gated_delta_rule",
        "grouped_linear",
        "key_selection",
        "linear",
        "low_rank",
        "paged_attention",
        "sample_tokens",
        "selective_scan",
        "state_space_scan",
    }
)


def parse_choices(text: str) -> dict[str, str]:
    """The forced backend of each operation in `text`; ValueError for unknown operations and backends."""
    choices: dict[str, str] = {}
    for part in _parts(text):
        if _is_variant(part):
            continue
        op, _, backend = part.rpartition("=")
        ops = [op] if op else sorted(_BACKENDS)
        for name in ops:
            known = _known_backends(name)
            if backend in known:
                choices[name] = backend
            elif op:
                raise ValueError(
                    f"{ENVIRONMENT_VARIABLE}: {name} has no backend {backend!r}; it has {', '.join(known)}."
                )
        if not op and backend not in choices.values():
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: no operation has a backend {backend!r}.")
    return choices


def forced_variant(supported: Sequence[str]) -> str | None:
    """The native variant that the environment names, which must be one of `supported`; None where it names none.

    Raises:
        ValueError: Two variants are named, or one that this processor cannot run or that is not built.
    """
    named = [part for part in _parts(os.environ.get(ENVIRONMENT_VARIABLE, "")) if _is_variant(part)]
    if len(named) > 1:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: only one native variant can be named, not {' and '.join(named)}.")
    if named and named[0] not in supported:
        available = ", ".join(supported) or "none"
        raise ValueError(
            f"{ENVIRONMENT_VARIABLE}: the native variant {named[0]!r} is not built or cannot run on this processor; "
            f"available: {available}."
        )
    return named[0] if named else None


def forces_reference() -> bool:
    """Whether the environment names the reference for every operation."""
    return REFERENCE in _parts(os.environ.get(ENVIRONMENT_VARIABLE, ""))


def _is_variant(name: str) -> bool:
    from llmstack_kernels.build_native import ALL_VARIANTS  # here, since `python -m` runs that module

    return name in ALL_VARIANTS


def _parts(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]


def _known_backends(op: str) -> list[str]:
    if op not in _BACKENDS:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: unknown operation {op!r}; known are {', '.join(sorted(_BACKENDS))}.")
    return [*sorted({backend for names in _BACKENDS[op].values() for backend in names}), REFERENCE]


def choose(op: str, device_type: str, choices: Mapping[str, str]) -> str:
    """Name of the backend for `op`: the forced one, else the best available on the device."""
    forced = choices.get(op)
    if forced is not None:
        return forced if forced != REFERENCE and _is_available(op, forced, device_type) else REFERENCE
    for name in _BACKENDS[op].get(device_type, ()):
        if _is_available(op, name, device_type):
            return name
    return REFERENCE


def _is_available(op: str, backend: str, device_type: str) -> bool:
    if backend == TRITON:
        # Its modules cannot be imported where it is not installed.
        return launch.is_available() and (device_type == "cuda" or launch.is_interpreted())
    if backend not in _BACKENDS[op].get(device_type, ()):
        return False
    return bool((_runtime(backend) or _module(op, backend)).is_available())


def _runtime(backend: str) -> ModuleType | None:
    """The module that runs all operations of a backend; None where each one is a runtime of its own."""
    name = _RUNTIMES.get(backend)
    return None if name is None else importlib.import_module(f"{__package__}.{name}")


@cache
def implementation(op: str, device_type: str) -> ModuleType:
    """The module that implements `op` on devices of `device_type`, such as `cpu` or `cuda`."""
    choices = parse_choices(os.environ.get(ENVIRONMENT_VARIABLE, ""))
    return _module(op, choose(op, device_type, choices))


def backends(device_type: str = "cpu") -> dict[str, str]:
    """Operation to the backend that runs it on `device_type`, for logs: its name and, if it has one, its note."""
    names: dict[str, str] = {}
    for op in sorted(_BACKENDS):
        module = implementation(op, device_type)
        name = module.__name__.rpartition(".")[2]
        described = module if hasattr(module, "describe") else _runtime(name)
        note = "" if described is None else described.describe()
        names[op] = f"{name} ({note})" if note else name
    return names


def torch_build(device_type: str = "cpu") -> str:
    """The facts that the bits of PyTorch's own operations depend on: its version, and the processor or GPU."""
    is_gpu = device_type == "cuda"
    return f"{torch.__version__}, {torch.cuda.get_device_name() if is_gpu else torch.backends.cpu.get_cpu_capability()}"


def device_report(device_type: str = "cpu") -> dict[str, str]:
    """The build of PyTorch, and the caches that native kernels are cut to, which change no bit."""
    return {"torch": torch_build(device_type)} | ({"caches": caches.describe()} if device_type == "cpu" else {})


def _module(op: str, backend: str) -> ModuleType:
    if backend == REFERENCE and op not in _OWN_REFERENCES:
        return importlib.import_module(f"{__package__}.{REFERENCE}")
    return importlib.import_module(f"{__package__}.{op}.{backend}")
