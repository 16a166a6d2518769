"""Limits of the GPUs that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

WARP_SIZE = 32
MAX_GRID = (2**31 - 1, 65_535, 65_535)
_REGISTERS_PER_SM = 65_536
_WARPS_PER_SM = 64
_BLOCKS_PER_SM = 32
# Registers are given to a warp in units of 256, and the driver keeps 1 KB of each block's shared memory.
_REGISTER_UNIT = 256
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU.

    Attributes:
        arch: Compute capability, times ten.
        max_shared_bytes: The most that a block may use.
        shared_bytes_per_sm: The memory that all blocks of a multiprocessor share.
        max_local_bytes: Of a thread, where nothing is tuned for this kind of GPU; 0 elsewhere.
    """

    arch: int
    max_shared_bytes: int
    shared_bytes_per_sm: int
    max_local_bytes: int = 0

    def blocks_per_sm(self, num_warps: int, registers: int, shared_bytes: int) -> int:
        """The number of blocks that can be resident at once; 0 where not even one fits."""
        registers_per_warp = -(-max(registers, 1) * WARP_SIZE // _REGISTER_UNIT) * _REGISTER_UNIT
        warps = min(_WARPS_PER_SM, _REGISTERS_PER_SM // registers_per_warp)
        shared = self.shared_bytes_per_sm // (shared_bytes + _RESERVED_SHARED_BYTES)
        return min(_BLOCKS_PER_SM, warps // num_warps, shared)


TARGETS = {
    90: Target(90, max_shared_bytes=227 * 1024, shared_bytes_per_sm=228 * 1024),  # H100, H200
    100: Target(100, max_shared_bytes=227 * 1024, shared_bytes_per_sm=228 * 1024, max_local_bytes=16),  # B200
    80: Target(80, max_shared_bytes=163 * 1024, shared_bytes_per_sm=164 * 1024),  # A100
}
