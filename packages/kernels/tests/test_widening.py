"""The assembly that unpacks small numbers means what the plain arithmetic beside it does."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.linear import widening

# All words in the low half of a register, all of them in another order in the high half.
LOW = torch.arange(1 << 16)
HIGH = (LOW * 40503 + 12345) % (1 << 16)
TABLES = {"0xea": lambda a, b, c: (a & b) | c, "0x6a": lambda a, b, c: (a & b) ^ c}


def as_bfloat16(halves: torch.Tensor) -> torch.Tensor:
    return halves.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """In both halves of a register; float64 holds the products and sums of these numbers exactly."""
    halves = [
        (as_bfloat16(a >> shift).double() * as_bfloat16(b >> shift).double() + as_bfloat16(c >> shift).double())
        for shift in (0, 16)
    ]
    low, high = (half.bfloat16().view(torch.int16).long() & 0xFFFF for half in halves)
    return low | (high << 16)


def run(assembly: str, registers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The registers after the few instructions that there are."""

    def read(name: str) -> torch.Tensor:
        return torch.tensor(int(name, 0)).expand(1 << 16) if name[0].isdigit() else registers[name]

    for line in assembly.strip(" \n{}").splitlines():
        name, _, rest = line.strip().rstrip(";").partition(" ")
        target, *operands = (operand.strip() for operand in rest.split(","))
        if name == ".reg":
            continue
        if name == "lop3.b32":
            registers[target] = TABLES[operands[3]](*map(read, operands[:3]))
        else:
            operation = {
                "mov.b32": lambda a: a,
                "shr.u32": lambda a, b: a >> b,
                "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
                "and.b32": lambda a, b: a & b,
                "fma.rn.bf16x2": fma,
            }[name]
            registers[target] = operation(*map(read, operands))
    return registers


def halves(register: torch.Tensor) -> torch.Tensor:
    return torch.stack((as_bfloat16(register), as_bfloat16(register >> 16)))


def words() -> torch.Tensor:
    return torch.stack((LOW, HIGH))


def byte(place: int) -> torch.Tensor:
    return ((words() >> 8 * place) & 255).to(torch.uint8).view(torch.int8)


def test_bytes_become_their_integers() -> None:
    out = run(widening._INT8_ASSEMBLY.value, {"$2": LOW | (HIGH << 16)})
    for plane in (0, 1):
        assert torch.equal(halves(out[f"${plane}"]).float(), byte(plane).float())


def test_bytes_become_their_numbers_of_e4m3_over_256() -> None:
    out = run(widening._FP8_ASSEMBLY.value, {"$2": LOW | (HIGH << 16)})
    for plane in (0, 1):
        expected = byte(plane).view(torch.float8_e4m3fn).float() / 256
        is_number = expected.isfinite()
        assert torch.equal(halves(out[f"${plane}"]).float()[is_number], expected[is_number])


@pytest.mark.parametrize("scale", [1.0, 0.0123, 3.1e-5, 77.0])
def test_quarters_of_words_become_integers_times_scale_rounded_once(scale: float) -> None:
    scales = [torch.tensor(scale * (1 + 0.3 * plane)).bfloat16() for plane in range(4)]
    bits = [int(one.view(torch.int16)) & 0xFFFF for one in scales]
    inputs = {f"${5 + plane}": torch.tensor(bits[plane] * 0x10001).expand(1 << 16) for plane in range(4)}
    out = run(widening._INT4_ASSEMBLY.value, {"$4": LOW | (HIGH << 16)} | inputs)
    for plane in range(4):
        integers = ((words() >> 4 * plane) & 15 ^ 8) - 8
        assert torch.equal(halves(out[f"${plane}"]), (integers.float() * scales[plane].float()).bfloat16())


def test_quarters_of_words_become_their_numbers_of_e2m1() -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    out = run(widening._MXFP4_ASSEMBLY.value, {"$4": LOW | (HIGH << 16)})
    for plane in range(4):
        assert torch.equal(halves(out[f"${plane}"]).float(), values[(words() >> 4 * plane) & 15])


def test_each_snippet_names_as_many_operands_as_it_is_given() -> None:
    for assembly, num_operands in (
        (widening._INT8_ASSEMBLY, 3),
        (widening._FP8_ASSEMBLY, 3),
        (widening._INT4_ASSEMBLY, 9),
        (widening._MXFP4_ASSEMBLY, 5),
    ):
        assert sorted(set(re.findall(r"\$(\d)", assembly.value))) == [str(place) for place in range(num_operands)]
