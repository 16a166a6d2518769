"""Finds the kernels of all operations and the cases they are compiled in."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

import llmstack_kernels
from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.launch import Launch, intercepted

_ENTRY_SUFFIX = "_kernel"


class MissingCasesError(Exception):
    """An operation has Triton kernels and no compile cases."""


def ops_with_kernels() -> list[str]:
    """Operations that have a `triton.py`, by name."""
    folders = [module.name for module in pkgutil.iter_modules(llmstack_kernels.__path__) if module.ispkg]
    return sorted(op for op in folders if _exists(op, "triton"))


def cases_of(op: str) -> list[CompileCase]:
    """The compile cases of `op`, in order.

    Raises:
        MissingCasesError: It has none.
    """
    from llmstack_kernels.ahead_of_time.cases import CASES  # imports Triton, which may be absent

    if op not in CASES:
        raise MissingCasesError(f"{op} has kernels in triton.py and no cases in ahead_of_time/cases: nothing compiles.")
    return list(CASES[op]())


def launches_of(case: CompileCase) -> list[Launch]:
    """The kernels that the call of `case` would start, in order; nothing is compiled or run."""
    launches: list[Launch] = []
    with intercepted(launches.append):
        case.call()
    return launches


def name_of(kernel: object) -> str:
    """Name of the function under Triton's decorator."""
    return str(getattr(kernel, "__name__", kernel))


def kernels_of(op: str) -> set[str]:
    """Names of the kernels that `op` defines: those ending in `_kernel`; other functions are parts of them."""
    import triton

    _module(op, "triton")
    prefix = f"{llmstack_kernels.__name__}.{op}."
    return {
        name
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(prefix)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith(_ENTRY_SUFFIX) and value.module == module_name
    }


def coverage_complaints(op: str, cases: Iterable[CompileCase]) -> Iterator[str]:
    """A sentence per kernel that no case or no sample starts, per claim for one that is not, per name used twice."""
    cases = list(cases)
    started = {case.name: {name_of(launch.kernel) for launch in launches_of(case)} for case in cases}
    everywhere = set().union(*started.values())
    in_samples = set().union(*(started[case.name] for case in cases if case.is_sample))
    for kernel in sorted(kernels_of(op) - everywhere):
        yield f"{kernel} is started by no case"
    for kernel in sorted(everywhere - in_samples):
        yield f"{kernel} is started by no sample case, so no ordinary run of the tests compiles it"
    for case in cases:
        for kernel in sorted((case.claims or {}).keys() - started[case.name]):
            yield f"{case.name} claims something for {kernel} and does not start it"
    if len(started) < len(cases):
        yield "two cases have one name"


def _exists(op: str, name: str) -> bool:
    return importlib.util.find_spec(f"{llmstack_kernels.__name__}.{op}.{name}") is not None


def _module(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"{llmstack_kernels.__name__}.{op}.{name}")
