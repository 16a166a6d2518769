"""Counter-based random numbers: functions of seed and output index alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def seeds_array(seeds: Iterable[int]) -> npt.NDArray[np.uint64]:
    """Seeds of any size and sign, modulo 2**64."""
    return np.array([seed & _MASK for seed in seeds], dtype=np.uint64)


def uniforms(seeds: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per row.

    The output function of SplitMix64 (Steele, Lea, Flood, 2014) over a counter that starts at the mixed seed. One
    number per row suffices, since tokens are chosen by inverting the distribution function.
    """
    counters = _mix(seeds + _GOLDEN) + (output_indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
