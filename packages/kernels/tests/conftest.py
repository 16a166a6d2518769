"""Triton kernels run on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from llmstack_kernels.testing import fixed_order_of_sums

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined


@pytest.fixture
def triton_device() -> Iterator[str]:
    """The device that Triton kernels run on; in the interpreter, sums have a fixed order on every processor."""
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    if torch.cuda.is_available():
        yield "cuda"
    else:
        with fixed_order_of_sums():
            yield "cpu"


# In the interpreter bfloat16 is wrong without a word: it computes on the raw bits.
_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture(params=_DTYPES, ids=str)
def triton_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Types that Triton kernels are tested in."""
    dtype: torch.dtype = request.param
    return dtype
