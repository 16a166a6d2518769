"""Test support: native variants, and a fixed order of sums in the interpreter.

The interpreter computes `tl.dot` with NumPy, whose BLAS adds in an order that depends on the shapes of the tiles and on
the processor. `tl.sum` has an order that depends on the memory layout. Tests that compare bits would then test the BLAS
instead of the kernel. With `fixed_order_of_sums`, one element's sum depends on its own operands alone, as it does in
the instructions of a GPU. The kernel still decides the order: its tiles, chunks and splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from llmstack_kernels.build_native import named_variants, variants
from llmstack_kernels.dispatch import backends
from llmstack_kernels.native import library, supported_variants


def native_variants(all_named: bool = False) -> list[Any]:
    """Parameters for pytest: each library of native kernels for this family of processors, best first.

    Those that this processor cannot run are skipped, with the reason. `all_named`: Those that share a library with
    another too, for operations of which they have functions of their own.
    """
    import pytest

    supported = supported_variants()
    reason = "this processor cannot run the {} variant of the native kernels, or it is not built"
    return [
        pytest.param(name, marks=[] if name in supported else pytest.mark.skip(reason=reason.format(name)))
        for name in (named_variants() if all_named else variants())
    ]


def runs_native_kernels() -> bool:
    """Whether operations on the processor run in native code: it is built, and the environment chooses nothing else."""
    return library() is not None and all(
        backends()[name].startswith("native") for name in ("linear", "paged_attention", "rms_norm")
    )


def multiply_in_order(left: Any, right: Any, dtype: Any) -> Any:
    """The matrix product of two NumPy arrays; each element adds its products one by one, in ascending order.

    Args:
        left: [..., num_rows, num_inputs].
        right: [..., num_inputs, num_columns].
        dtype: Type of the products and of the sums.

    Returns:
        [..., num_rows, num_columns]. Element-wise operations alone are used, so no other element has an influence.
    """
    left, right = left.astype(dtype), right.astype(dtype)
    total = left[..., :, :1] * right[..., :1, :]
    for index in range(1, left.shape[-1]):
        total += left[..., :, index : index + 1] * right[..., index : index + 1, :]
    return total


def sum_in_order(values: Any, axis: int | None, keepdims: bool) -> Any:
    """The sum of a NumPy array along `axis` (None: of all elements), as a binary tree of element-wise additions.

    The order depends on the length of the axis alone. Types are those of `numpy.sum`, which adds float16 in float32.
    """
    import numpy as np

    total = np.moveaxis(values.reshape(-1) if axis is None else values, axis or 0, 0)
    if values.dtype == np.float16:
        total = total.astype(np.float32)
    elif values.dtype.kind in "bi":
        total = total.astype(np.int64)
    while len(total) > 1:
        half = (len(total) + 1) // 2
        rest = len(total) - half
        total = np.concatenate([total[:rest] + total[half:], total[rest:half]])
    total = total[0].astype(values.dtype) if values.dtype == np.float16 else total[0]
    if not keepdims:
        return total
    return np.reshape(total, (1,) * values.ndim) if axis is None else np.expand_dims(total, axis)


@contextmanager
def fixed_order_of_sums() -> Iterator[None]:
    """Makes `tl.dot` and `tl.sum` of Triton's interpreter add in a fixed order until the context ends.

    A product is complete before the accumulator is added to it, so the number of inputs that a kernel multiplies at
    once remains visible in the bits.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    from triton.runtime import interpreter

    def dot(_: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = multiply_in_order(a.data, b.data, d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def reduce_sum(self: Any, values: Any) -> Any:
        return self.to_tensor(sum_in_order(values.handle.data, self.axis, self.keep_dims), values.dtype)

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        mock.patch.object(interpreter.ReduceOps, "sum", reduce_sum),
    ):
        yield
