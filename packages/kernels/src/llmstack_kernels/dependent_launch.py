"""Kernels that start while the one before them ends: what they need of their own is on its way when they may go on.

A kernel that is started with `launch_pdl=supports_dependent_launch(device)` calls `wait_for_previous` in every program,
before it reads what another kernel may have written and before it writes anything. Weights may be read earlier.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants to see it beside every kernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


@triton.jit
def wait_for_previous():
    """Returns once the kernel before has ended, and lets the next one start; where that does not exist, at once."""
    if cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()
