"""The caches of the processor, and what native kernels cut to fit them.

Caches are read once, when the library is loaded. `LLMSTACK_CACHE_SIZES=32K,512K,4M` states other ones, for tests and
comparisons: L1 for data, L2, and the share of L3, of a core. No cut changes the order of a sum, so results are the same
bits for all sizes. Imports no PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmstack_kernels.usable_cpus import num_usable_cpus, own_cpus, read_text

ENVIRONMENT_VARIABLE = "LLMSTACK_CACHE_SIZES"

_KIB, _MIB = 1 << 10, 1 << 20
_UNITS = {"": 1, "K": _KIB, "M": _MIB, "G": 1 << 30}
_LEAST, _MOST = 4 * _KIB, 1 << 30
_MOST_CPUS = 32  # that are looked at, of all: two kinds of cores are seen, and a start is not held up

# Of glibc, which asks the processor (CPUID). Python has no names for them. The size that it gives for L3 is that of all
# cores of a package.
_SYSCONF_L1, _SYSCONF_L2 = 188, 191


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes that one core has; where cores differ, the least of them.

    Attributes:
        l1: For data.
        l2: Divided by the cores that share it.
        l3: The share of a core: L3 divided by the processors that share it and that this process may use at once.
        reach: The whole L3 that a core reaches.
        source: Where they were found: `environment`, `sysfs`, `cpuid` or `defaults`.
    """

    l1: int = 32 * _KIB
    l2: int = 512 * _KIB
    l3: int = 2 * _MIB
    reach: int = 32 * _MIB
    source: str = "defaults"

    def __str__(self) -> str:
        sizes = f"L1d {_text(self.l1)}, L2 {_text(self.l2)}, L3 {_text(self.l3)} a core"
        return f"{sizes} of {_text(self.reach)} ({self.source})"


@dataclass(frozen=True, slots=True)
class Cuts:
    """Bytes of what kernels take at a time, in the order of `Cuts` in cuts.h.

    Attributes:
        stretch: Of a panel that the tiles of 7 to 15 rows take one after the other, with AVX-512.
        few_rows_stretch: The same of two to six rows, with AVX2.
        ahead: The distance at which stretches are prefetched.
        panel: Of the longest panel that up to 48 rows pass over as a whole; it is twice that for more rows.
        panel_part: Of the parts of a longer panel, over each of which all rows pass before the next.
        row_part: Of rows, as products take them, that stay in L2 while all panels pass over them.
        shared_rows: The same of rows that are read as they are, in L3.
        span: Of small numbers that are widened to float32 once for many rows.
        key_stretch: Of each key of a tile that is laid out for several query heads of a decode.
        item: Of the queries and sums of an item of a prompt's attention.
    """

    stretch: int
    few_rows_stretch: int
    ahead: int
    panel: int
    panel_part: int
    row_part: int
    shared_rows: int
    span: int
    key_stretch: int
    item: int

    @classmethod
    def of(cls, sizes: CacheSizes) -> Cuts:
        """The rules, one for each cut."""
        return cls(
            # A third of L1, beside the stretch that is fetched meanwhile, and the inputs and sums of 15 rows.
            stretch=_power_of_two(sizes.l1 // 3),
            # A quarter: tiles of fewer sums read inputs more often.
            few_rows_stretch=_power_of_two(sizes.l1 // 4),
            # What memory needs to answer at its rate, and no more than half of L1.
            ahead=min(16 * _KIB, sizes.l1 // 2),
            # A quarter of L2: a panel, the one that is fetched meanwhile, and the rows' inputs.
            panel=sizes.l2 // 4,
            # A little less, since a part of the next panel is fetched beside the rest of this one.
            panel_part=sizes.l2 // 16 * 3,
            # Half of L2, beside the panel that passes.
            row_part=sizes.l2 // 2,
            # A quarter of a core's L3, beside outputs, weights on their way, and what others read.
            shared_rows=sizes.l3 // 4,
            # An eighth of L2, beside the panel's numbers and the rows' inputs.
            span=sizes.l2 // 8,
            # 64 keys in an eighth of L1. Widened to float32 they take twice that.
            key_stretch=max(32, _power_of_two(sizes.l1 // 8 // 64)),
            # A quarter of L2, beside two tiles of keys and values.
            item=sizes.l2 // 4,
        )

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {_text(getattr(self, field.name))}" for field in dataclasses.fields(self))


def cache_sizes() -> CacheSizes:
    """The caches that the environment states, else those of the processors that this process may use.

    Raises:
        ValueError: The environment variable is no list of three sizes.
    """
    stated = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return parse_cache_sizes(stated) if stated else read_cache_sizes()


def describe() -> str:
    """The caches and the cuts in a line, for reports."""
    sizes = cache_sizes()
    return f"{sizes}: {Cuts.of(sizes)}"


def parse_cache_sizes(text: str) -> CacheSizes:
    """The sizes in a text such as `32K,512K,4M`. `reach` is the share of each usable processor together.

    Raises:
        ValueError: It has another form, or a size that no cache has.
    """
    found = [re.fullmatch(r"(\d{1,12})([KMG]?)", part.strip().upper()) for part in text.split(",")]
    sizes = [int(match[1]) * _UNITS[match[2]] for match in found if match]
    if len(found) != 3 or len(sizes) != 3 or not all(_LEAST <= size <= _MOST for size in sizes):
        raise ValueError(
            f"{ENVIRONMENT_VARIABLE} takes the sizes of L1, L2 and of a core's share of L3, each from 4K to 1G, such "
            f"as 32K,512K,4M; not {text[:80]!r}."
        )
    l1, l2, l3 = sizes
    return CacheSizes(l1, l2, l3, l3 * num_usable_cpus(), "environment")


@functools.cache
def read_cache_sizes(root: Path = Path("/")) -> CacheSizes:
    """The sizes that Linux reports, else those of the processor itself. What neither knows has a default.

    Args:
        root: Where `proc` and `sys` are found.
    """
    cpus = own_cpus()
    found: dict[str, list[int]] = {"l1": [], "l2": [], "l3": [], "reach": []}
    usable = num_usable_cpus(root)
    for cpu in cpus[:: -(-len(cpus) // _MOST_CPUS)]:
        for name, size in _of_cpu(root / f"sys/devices/system/cpu/cpu{cpu}", set(cpus), usable):
            found[name].append(size)
    least = {name: min(sizes) for name, sizes in found.items() if sizes}
    if "l1" in least and "l2" in least:
        return CacheSizes(**least, source="sysfs")
    l1, l2 = _sysconf(_SYSCONF_L1), _sysconf(_SYSCONF_L2)
    return CacheSizes(l1, l2, source="cpuid") if l1 and l2 else CacheSizes()


def _of_cpu(folder: Path, cpus: set[int], usable: int) -> Iterator[tuple[str, int]]:
    """Name and bytes of each cache of a processor. Threads of a core count once for L2, which they use in turns."""
    threads = max(1, len(_cpus_of(read_text(folder / "topology/thread_siblings_list"))))
    for index in sorted((folder / "cache").glob("index*")):
        level, kind, size, sharers = (
            read_text(index / name).strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        match = re.fullmatch(r"(\d{1,9})([KMG]?)", size)
        if match is None or kind == "Instruction":
            continue
        num_bytes, shared = int(match[1]) * _UNITS[match[2]], _cpus_of(sharers)
        if not _LEAST <= num_bytes <= 4 * _MOST:
            continue
        if level == "1":
            yield "l1", num_bytes
        elif level == "2":
            yield "l2", num_bytes // max(1, len(shared) // threads)
        elif level == "3":
            yield "l3", num_bytes // max(1, min(len(shared & cpus), usable))
            yield "reach", num_bytes


def _cpus_of(text: str) -> set[int]:
    """The processors in a list such as `0-3,8`; none where it has another form."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) >= 1 << 16:
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def _sysconf(name: int) -> int:
    try:
        size = os.sysconf(name)
    except (OSError, ValueError):  # another C library
        return 0
    return size if _LEAST <= size <= _MOST else 0


def _power_of_two(number: int) -> int:
    return 1 << number.bit_length() - 1


def _text(num_bytes: int) -> str:
    for unit, size in (("M", _MIB), ("K", _KIB)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g}{unit}"
    return str(num_bytes)
