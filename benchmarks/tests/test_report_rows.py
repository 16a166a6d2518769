"""Floors of the reference card, tables, and the rows that the document plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.blocks import PARTS
from report.floors import GPT2, LLAMA_1B, LLAMA_8B, REFERENCE_CARD, ModelShape, decode_s, prefill_s, requests_s
from report.plan import PLAN, PlannedRow, short_table
from report.rows import Row, number, table

BENCHMARKS = Path(__file__).resolve().parents[1]


DOCUMENT = BENCHMARKS.parent / "docs" / "benchmarks-gpu.md"


@pytest.mark.parametrize(
    ("shape", "gigabytes", "kv_bytes"),
    [(GPT2, 0.247, 36_864), (LLAMA_1B, 2.472, 32_768), (LLAMA_8B, 15.01, 131_072)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_step_reads_the_published_sizes(shape: ModelShape, gigabytes: float, kv_bytes: int) -> None:
    assert shape.weight_bytes() / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    assert shape.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("shape", "context", "weights", "milliseconds"),
    [
        (GPT2, 1024, "bf16", (0.066, 0.128, 0.619, 2.33)),
        (GPT2, 1024, "w8", (0.047, 0.108, 0.600, 2.33)),
        (LLAMA_1B, 1024, "bf16", (0.583, 0.637, 1.07, 2.80)),
        (LLAMA_1B, 1024, "w4", (0.247, 0.301, 0.738, 2.80)),
        (LLAMA_1B, 8192, "bf16", (0.637, 1.07, 4.57, 16.8)),
        (LLAMA_8B, 1024, "bf16", (3.52, 3.74, 5.49, 12.9)),
        (LLAMA_8B, 1024, "w8", (1.90, 2.12, 3.87, 12.9)),
        (LLAMA_8B, 1024, "w4", (1.11, 1.33, 3.21, 12.9)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_decode_floors_of_the_reference_card(
    shape: ModelShape, context: int, weights: str, milliseconds: tuple[float, ...]
) -> None:
    found = [1e3 * decode_s(shape, batch, context, REFERENCE_CARD, weights) for batch in (1, 8, 64, 256)]
    assert found == pytest.approx(milliseconds, rel=0.01, abs=6e-4)


def test_keys_of_8_bits_take_half_the_time_of_reading_them() -> None:
    wide, narrow = (decode_s(LLAMA_8B, 64, 8192, REFERENCE_CARD, kv_bits=bits) for bits in (16, 8))
    assert 1e3 * (wide - narrow) == pytest.approx(8.0, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "num_tokens", "milliseconds"),
    [(LLAMA_1B, 2048, 5.4), (LLAMA_1B, 8192, 25.8), (LLAMA_8B, 2048, 37.6), (LLAMA_8B, 8192, 167)],
    ids=lambda value: getattr(value, "name", None),
)
def test_prefill_floors_of_the_reference_card(shape: ModelShape, num_tokens: int, milliseconds: float) -> None:
    assert 1e3 * prefill_s(shape, num_tokens, REFERENCE_CARD) == pytest.approx(milliseconds, rel=0.01)


def test_the_floor_of_many_requests_on_the_reference_card() -> None:
    assert requests_s(LLAMA_8B, 256, 1024, 1024, REFERENCE_CARD) == pytest.approx(22.0, rel=0.01)
    assert requests_s(LLAMA_1B, 256, 1024, 1024, REFERENCE_CARD) == pytest.approx(4.5, rel=0.02)


# --- rows and tables ---


def test_percent_is_of_a_ceiling_for_rates_and_of_a_floor_for_times() -> None:
    assert Row("rate", "GB/s", 85.0, 100.0).percent() == 85.0
    assert Row("time", "ms", 4.0, 3.0).percent() == 75.0
    assert Row("nothing", "ms", None, 3.0).percent() is None
    assert Row("unbounded", "ms", 3.0).percent() is None


def test_numbers_have_as_many_digits_as_they_deserve() -> None:
    assert [number(value) for value in (None, 0.0, 0.12345, 12.345, 345.6, 4321.0)] == [
        "", "0", "0.123", "12.3", "346", "4,321",
    ]  # fmt: skip


def test_columns_are_aligned() -> None:
    assert table(("a", "b"), [("long", "1"), ("x", "22")]) == "a      b\nlong   1\nx     22"


def test_a_target_is_met_or_not_or_unknown() -> None:
    percent = PlannedRow("kernels", "rate", "GB/s", "ceiling", least_percent=85)
    assert [percent.is_met(Row("rate", "GB/s", value, 100.0)) for value in (85.0, 84.0, None)] == [True, False, None]
    assert percent.is_met(Row("rate", "GB/s", 85.0)) is None
    at_most = PlannedRow("engine", "overhead", "us", limit=200)
    assert [at_most.is_met(Row("overhead", "us", value)) for value in (200.0, 201.0)] == [True, False]
    at_least = PlannedRow("engine", "speed", "tok/s", limit=10)
    assert [at_least.is_met(Row("speed", "tok/s", value)) for value in (10.0, 9.0)] == [True, False]


def test_the_short_table_has_every_planned_row_measured_or_not() -> None:
    name = "8B decode, 1 x 1k"
    text = short_table("engine", {name: Row(name, "ms", 3.9, 3.5, 0.01)})
    lines = text.splitlines()
    assert len(lines) == 1 + sum(planned.part == "engine" for planned in PLAN)
    assert "3.9" in text
    assert "89.7" in text
    assert "yes" in text
    assert sum(" - " in line for line in lines[1:]) == len(lines) - 2


def test_names_are_unique() -> None:
    assert len({planned.name for planned in PLAN}) == len(PLAN)
    for blocks in PARTS.values():
        assert len({block.name for block in blocks}) == len(blocks)


def test_the_document_has_every_planned_row_with_its_target() -> None:
    if not DOCUMENT.exists():
        pytest.skip("the package stands alone, without the repository's documents")
    text = DOCUMENT.read_text(encoding="utf-8")
    missing = [planned.name for planned in PLAN if f"| {planned.name} | {planned.unit} |" not in text]
    assert not missing
