"""Names of torchvision's operators, where only PyTorch's CPU build is there.

Builds of torchvision in the index are for GPUs. They refuse to be imported beside the CPU build, since their operators
are missing. What resizes pictures needs none of them.
"""

from __future__ import annotations

import importlib.util
from functools import cache

_NAMES = ("nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool",
          "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "qroi_align", "deform_conv2d",
          "_deform_conv2d_backward")  # fmt: skip
_KEPT = []


@cache
def let_torchvision_be_imported() -> bool:
    """Defines the names, to be called before transformers is imported; False if there is no torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in _NAMES:
        library.define(f"{name}(Tensor x) -> Tensor")
    _KEPT.append(library)  # with it the names would go
    return True
