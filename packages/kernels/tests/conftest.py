"""Triton kernels run on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # the report of a GPU is no package of ours

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined


@pytest.fixture
def triton_device() -> str:
    """Where Triton kernels run here."""
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    return "cuda" if torch.cuda.is_available() else "cpu"


# In the interpreter bfloat16 is wrong without a word: it computes on the raw bits.
_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture(params=_DTYPES, ids=str)
def triton_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Types that Triton kernels are tested in."""
    dtype: torch.dtype = request.param
    return dtype
