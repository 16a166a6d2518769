"""Every kernel compiles for GPUs that are not here, within their limits, to what the repository says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_kernels import launch
from llmstack_kernels.ahead_of_time import __main__ as command
from llmstack_kernels.ahead_of_time import collect, gate, table
from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.ahead_of_time.compile import Compiled
from llmstack_kernels.ahead_of_time.measure import Measurements, count_instructions, parse_resources
from llmstack_kernels.ahead_of_time.survey import Survey
from llmstack_kernels.ahead_of_time.table import Row, Table
from llmstack_kernels.ahead_of_time.target import TARGETS
from llmstack_kernels.graph_safety import no_host_synchronisation

MADE = Path(__file__).parent / "made_kernels.py"
MEASURED = Measurements(4, 40, 1024, 12, 500, 4, 0, 8, 0, 0, 0, 0)
ROW = Row("linear", "8b_bf16", "_linear_kernel", 90, MEASURED)

LISTING = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function _product_kernel:
  REG:30 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0

        code for sm_90a
                Function : _product_kernel
        .headerflags    @"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_ACCELERATORS EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000e220000000800 */
        /*0010*/              @!P0 STL.64 [R1+0x8], R2 ;               /* 0x0000000000187919 */
        /*0020*/             @UPT1 UTMALDG.2D [UR4], [UR6] ;           /* 0x0000000000187919 */
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R4 ;   /* 0x00000000000679c3 */
        /*10040*/                  HGMMA.64x64x16.F32.BF16 R24, R8 ;   /* 0x00000000000679c3 */
        /*10050*/                  NOP ;                               /* 0x00000000000679c3 */
"""


def run_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Where kernels are compiled, which they are not in the interpreter that these tests run them in."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (extra `triton`)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """What is found in kernels that have faults."""
    result = run_python(MADE)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.timeout(600)  # 15 s of a core with an empty cache, beside other tests
def test_a_sample_of_each_kernel_compiles_to_what_is_stored() -> None:
    result = run_python("-m", "llmstack_kernels.ahead_of_time", "--arch", "90")  # the full run compiles for 80, too
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_configuration_compiles_to_what_is_stored() -> None:
    result = run_python("-m", "llmstack_kernels.ahead_of_time", "--all")
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("no_power_of_two", "compile error", "range must be a power of 2"),
        ("spills", "local memory", "bytes of local memory per thread"),
        ("too_much_shared", "shared memory", "needs 491520 bytes of shared memory, a block has 232448"),
        ("single_warps", "claim", "claims products of warp groups (wgmma) and has none"),
        ("grid", "grid", "has 70000 programs along y, 65535 at most"),
        ("starts_late", "claim", "claims to start while the kernel before it ends (pdl), without launch_pdl=True"),
        ("writes_early", "claim", "writes before it waits for the kernel before"),
        ("never_waits", "claim", "never waits, so it may read what is not yet written"),
    ],
)
def test_each_fault_is_found(made: dict[str, Any], case: str, kind: str, words: str) -> None:
    found = [(found_kind, text) for where, found_kind, text in made["findings"] if where.split()[1] == case]
    assert any(found_kind == kind and words in text for found_kind, text in found), found


@pytest.mark.parametrize("case", ["sound", "thrice", "waits", "for_newer"])
def test_nothing_is_found_where_nothing_is_wrong(made: dict[str, Any], case: str) -> None:
    assert not [where for where, _, _ in made["findings"] if where.split()[1] == case]


def test_a_kind_of_gpu_that_nothing_is_tuned_for_may_spill_a_little() -> None:
    case, start = CompileCase("case", lambda: None), launch.Launch(len, (1,), (), {})

    def kinds(arch: int, local_bytes: int) -> list[gate.Kind]:
        compiled = Compiled("op", case, "kernel", TARGETS[arch], start, None)
        return [one.kind for one in gate.findings(compiled, replace(MEASURED, spills=2, local_bytes=local_bytes))]

    assert kinds(100, 16) == []
    assert kinds(100, 24) == kinds(90, 8) == [gate.Kind.LOCAL_MEMORY]


def test_launches_that_compile_to_the_same_are_one_row(made: dict[str, Any]) -> None:
    assert [row[2] for row in made["rows"] if row[1] == "thrice"] == ["_scale_kernel", "_scale_kernel#2"]


def test_a_case_for_newer_gpus_is_left_out(made: dict[str, Any]) -> None:
    assert not [row for row in made["rows"] if row[1] == "for_newer"]


@pytest.mark.parametrize(
    "complaint",
    [
        "_rms_norm_kernel is started by no case",
        "_scale_kernel is started by no sample case, so no ordinary run of the tests compiles it",
        "mistaken claims something for _product_kernel and does not start it",
        "two cases have one name",
    ],
)
def test_what_nothing_would_compile_is_found(made: dict[str, Any], complaint: str) -> None:
    assert complaint in made["coverage"]


def test_an_operation_without_cases_is_an_error() -> None:
    with pytest.raises(collect.MissingCasesError, match="ahead_of_time has kernels"):
        collect.cases_of("ahead_of_time")


def test_resources_are_read_from_the_listing() -> None:
    assert parse_resources(LISTING) == {"REG": 30, "STACK": 16, "LOCAL": 8}


def test_a_listing_without_resources_is_refused() -> None:
    with pytest.raises(ValueError, match="LOCAL, STACK"):
        parse_resources("REG:30")


def test_instructions_are_counted_past_their_predicates() -> None:
    assert count_instructions(LISTING) == {"LDC": 1, "STL": 1, "UTMALDG": 1, "HGMMA": 2}


def test_a_listing_without_instructions_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        count_instructions("Function : nothing")


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared_bytes", "blocks"),
    [
        (4, 32, 0, 16),  # 64 warps
        (1, 16, 0, 32),  # 32 blocks
        (4, 128, 0, 4),  # 65,536 registers
        (8, 40, 113 * 1024, 2),  # 228 KB, of which each block costs one more
        (32, 72, 0, 0),
    ],
)
def test_resident_blocks_are_limited_by_the_scarcest(
    num_warps: int, registers: int, shared_bytes: int, blocks: int
) -> None:
    assert TARGETS[90].blocks_per_sm(num_warps, registers, shared_bytes) == blocks


def test_the_table_survives_being_stored(tmp_path: Path) -> None:
    path, other = tmp_path / "table.csv", tmp_path / "other.csv"
    rows = (ROW, replace(ROW, arch=80), replace(ROW, op="activation"))
    table.write(Table("3.6.0", rows), path)
    table.write(Table("3.6.0", rows[::-1]), other)
    assert path.read_text() == other.read_text()
    stored = table.read(path)
    assert stored.triton_version == "3.6.0"
    assert set(stored.rows) == set(rows)


@pytest.mark.parametrize("text", ["", "op,case\n", "# Triton 3.6.0; written by hand\nop,case\n"])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="--update"):
        table.read(path)


@pytest.mark.parametrize(
    ("compiled", "is_whole", "expected"),
    [
        ([ROW], True, []),
        (
            [replace(ROW, measurements=replace(MEASURED, registers=48, wgmma=0))],
            True,
            ["registers 40 -> 48, wgmma 4 -> 0"],
        ),
        ([ROW, replace(ROW, case="new")], True, ["linear new _linear_kernel sm_90 is not in the table"]),
        ([], True, ["is in the table and compiled by nothing"]),
        ([], False, []),
    ],
)
def test_differences_from_the_table_are_reported(compiled: list[Row], is_whole: bool, expected: list[str]) -> None:
    found = list(table.differences([ROW], compiled, is_whole))
    assert len(found) == len(expected)
    assert all(words in line for words, line in zip(expected, found, strict=True))


def test_an_update_keeps_what_was_not_compiled() -> None:
    other, older = replace(ROW, op="activation"), replace(ROW, arch=80)
    new = replace(ROW, case="new")
    assert table.updated([ROW, other, older], [new], ["linear"], [90]) == [other, older, new]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """What the command finds, in place of what the compiler would make."""
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    rows = [replace(ROW, op="rms_norm")]
    monkeypatch.setattr(command, "survey", lambda *_, **__: Survey(rows=rows))
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    return rows


def test_the_command_tells_a_changed_kernel_from_the_stored_one(
    compiled: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["rms_norm", "--table", str(tmp_path / "table.csv")]
    assert command.main(arguments) == 1
    assert "does not exist" in capsys.readouterr().out
    assert command.main(["--update", *arguments]) == 0
    assert command.main(arguments) == 0
    compiled[0] = replace(compiled[0], measurements=replace(MEASURED, registers=64))
    assert command.main(arguments) == 1
    assert "registers 40 -> 64." in capsys.readouterr().out


def test_a_table_of_another_compiler_is_not_compared(
    compiled: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table.write(Table("2.0", ()), tmp_path / "table.csv")
    assert command.main(["rms_norm", "--table", str(tmp_path / "table.csv")]) == 0
    assert "The table is of Triton 2.0" in capsys.readouterr().out


def test_findings_fail_the_command(compiled: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = gate.Finding(gate.Kind.GRID, "rms_norm", "has too many programs")
    monkeypatch.setattr(command, "survey", lambda *_, **__: Survey(rows=compiled, findings=[finding]))
    assert command.main(["rms_norm", "--update", "--table", str(tmp_path / "table.csv")]) == 1


def test_an_operation_without_kernels_is_refused(compiled: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["no_such_op"]) == 2
    assert "no Triton kernels in no_such_op" in capsys.readouterr().err


def test_the_interpreter_is_refused(
    compiled: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "is_interpreted", lambda: True)
    assert command.main([]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.parametrize("op", collect.ops_with_kernels())
def test_no_operation_makes_the_host_wait(op: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    for case in collect.cases_of(op):
        with no_host_synchronisation():
            assert collect.launches_of(case), case.name
