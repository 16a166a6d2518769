"""Programmatic dependent launch: a kernel starts while the one before it ends.

Its own weights are on their way by the time it may read the results of others.

A kernel that is started with `launch_pdl=supports_dependent_launch(device)` calls `wait_for_previous` in every program,
before it reads what another kernel may have written and before it writes anything. Weights may be read earlier.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter requires it beside every kernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


@triton.jit
def wait_for_previous():
    """Waits for the kernel before and lets the next one start; returns at once on older GPUs."""
    if cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()
