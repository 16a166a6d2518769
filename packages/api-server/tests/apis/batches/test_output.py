"""The file of answers across runs that end early."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchAnswer, BatchFault, BatchRequest
from llmstack_server.apis.batches.output import BatchOutput, check_paths

A, B = BatchRequest(1, "a", "/x", b"{}"), BatchRequest(2, "b", "/x", b"{}")
FAULT, OTHER_FAULT = BatchFault(3, "a", "duplicate_custom_id", "no"), BatchFault(4, None, "invalid_json_line", "no")
LINE = BatchAnswer(200, "r", {}).encode(A)


def test_a_new_file_holds_what_was_appended(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with contextlib.closing(BatchOutput.open(str(path))) as output:
        assert not output.answered.covers(A)
        output.append(LINE)
        assert path.read_bytes() == LINE


def test_answers_and_faults_of_an_earlier_run_are_known(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINE + FAULT.encode())
    with contextlib.closing(BatchOutput.open(str(path))) as output:
        assert [output.answered.covers(item) for item in (A, B, FAULT, OTHER_FAULT)] == [True, False, True, False]


def test_the_fault_of_a_repeated_custom_id_is_not_the_answer_of_the_first(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(FAULT.encode())
    with contextlib.closing(BatchOutput.open(str(path))) as output:
        assert not output.answered.covers(A)


@pytest.mark.parametrize("num_bytes", range(1, len(LINE)))
def test_a_torn_last_line_is_mended_wherever_it_was_torn(tmp_path: Path, num_bytes: int):
    path = tmp_path / "out.jsonl"
    other = BatchAnswer(200, "r", {}).encode(B)
    path.write_bytes(other + LINE[:num_bytes])
    with contextlib.closing(BatchOutput.open(str(path))) as output:
        is_whole = num_bytes == len(LINE) - 1  # only the line break is missing
        assert output.answered.covers(B)
        assert output.answered.covers(A) == is_whole
        output.append(LINE)
    assert path.read_bytes() == other + LINE * (2 if is_whole else 1)


@pytest.mark.parametrize("line", [b"hello\n", b"{}\n", b"[]\n", b'{"response":null,"error":null}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, line: bytes):
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINE + line + LINE)
    with pytest.raises(BatchError, match="line 2"):
        BatchOutput.open(str(path))
    assert path.read_bytes() == LINE + line + LINE


def test_two_runs_do_not_write_one_file(tmp_path: Path):
    path = str(tmp_path / "out.jsonl")
    with contextlib.closing(BatchOutput.open(path)), pytest.raises(BatchError, match="another run"):
        BatchOutput.open(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(BatchError, match="--output-file"):
        BatchOutput.open(str(tmp_path / "no folder" / "out.jsonl"))


def test_the_input_is_never_the_output(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.touch()
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(BatchError, match="not overwritten"):
        check_paths(str(path), str(tmp_path / "link"))
    check_paths("-", "-")
    check_paths(str(path), str(tmp_path / "other"))
