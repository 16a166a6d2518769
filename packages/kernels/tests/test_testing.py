"""Sums of a fixed order in Triton's interpreter: right, and independent of shapes, layouts and processors."""

from __future__ import annotations

import numpy as np
import pytest

from llmstack_kernels.testing import multiply_in_order, sum_in_order


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_products_are_right(dtype: type) -> None:
    left, right = numbers(5, 33).astype(dtype), numbers(33, 7).astype(dtype)
    found = multiply_in_order(left, right, np.float32)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, left.astype(np.float64) @ right.astype(np.float64), atol=1e-5)


def test_an_element_of_a_product_has_the_same_bits_in_every_shape_and_layout() -> None:
    left, right = numbers(64, 48), numbers(48, 32)
    whole = multiply_in_order(left, right, np.float32)
    for rows in (slice(0, 1), slice(63, 64), slice(7, 40)):
        assert np.array_equal(multiply_in_order(left[rows], right, np.float32), whole[rows])
    columns = multiply_in_order(left, np.asfortranarray(right)[:, 3:4], np.float32)
    assert np.array_equal(columns, whole[:, 3:4])
    transposed = multiply_in_order(right.T, left.T, np.float32)
    assert np.array_equal(transposed.T, whole)


def test_a_product_adds_in_ascending_order() -> None:
    # 1e8 + 1 is 1e8 in float32, so the order decides.
    assert multiply_in_order(np.array([[1e8, 1, -1e8]]), np.ones((3, 1)), np.float32).item() == 0
    assert multiply_in_order(np.array([[1e8, -1e8, 1]]), np.ones((3, 1)), np.float32).item() == 1


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32, np.int8, np.bool_])
def test_sums_have_the_value_type_and_shape_of_numpys(dtype: type, axis: int | None, keepdims: bool) -> None:
    values = (numbers(6, 40) * 2).astype(dtype)
    found, expected = sum_in_order(values, axis, keepdims), np.sum(values, axis=axis, keepdims=keepdims)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=4e-3 if dtype is np.float16 else 1e-5, atol=1e-2)


def test_a_sum_has_the_same_bits_in_every_layout() -> None:
    values = numbers(9, 100)
    expected = sum_in_order(values, 1, False)
    assert np.array_equal(sum_in_order(np.asfortranarray(values), 1, False), expected)
    assert np.array_equal(sum_in_order(values[4:5], 1, False), expected[4:5])
    assert np.array_equal(sum_in_order(values.T, 0, False), expected)
