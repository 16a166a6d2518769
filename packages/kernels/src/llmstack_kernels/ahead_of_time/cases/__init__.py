"""Calls of every operation with the shapes and types of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.ahead_of_time.cases import attention, elementwise, linear, sampling

CASES: Mapping[str, Callable[[], Iterator[CompileCase]]] = {
    **attention.CASES,
    **elementwise.CASES,
    **linear.CASES,
    **sampling.CASES,
}
