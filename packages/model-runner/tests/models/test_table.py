"""The documentation's table of models and the code's are the same, and every parity test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from llmstack_model_runner.architectures import ARCHITECTURES

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "models.md"
PARITY = Path(__file__).with_name("test_parity.py")
HELPERS = Path(__file__).parents[1] / "helpers" / "model_runner_helpers"
pytestmark = pytest.mark.skipif(not DOCUMENT.is_file(), reason="the documentation is not part of the distribution")


def native_rows() -> dict[str, tuple[str, set[str]]]:
    """Architecture to the implementation's file and the names of its parity tests."""
    rows = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 4 and cells[2].startswith("native, "):
            file = re.search(r"\((.*)\)", cells[2])
            assert file is not None, line
            rows[cells[0].strip("` ")] = file.group(1), set(re.findall(r"`([^`]+)`", cells[3]))
    return rows


# By integration-tests/test_speech.py and test_draft_heads.py; transformers has no class of the latter.
PROVED_ELSEWHERE = {"WhisperForConditionalGeneration", "MiMoForCausalLM"}


def parity_cases() -> dict[str, str]:
    """Test name to family, as the parity tests' source has them: reading it needs no transformers."""
    others = ("mamba", "gemma", "glm", "state")
    tables = [_cases(HELPERS / f"{name}_cases.py", f"{name.upper()}_CASES") for name in others]
    return {name: family for table in (*tables, _cases(PARITY, "CASES")) for name, family in table.items()}


def _cases(file: Path, table: str) -> dict[str, str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == table:
            own = node.value.right if isinstance(node.value, ast.BinOp) else node.value  # a table of others | its own
            assert isinstance(own, ast.Dict)
            return {
                ast.literal_eval(name).replace(" ", "-"): ast.literal_eval(value.elts[0])
                for name, value in zip(own.keys, own.values, strict=True)
                if name is not None and isinstance(value, ast.Tuple)
            }
    raise AssertionError(f"{file} has no table {table}")


def test_the_table_names_exactly_the_architectures_of_the_code() -> None:
    assert set(native_rows()) == set(ARCHITECTURES)


def test_each_row_names_the_file_that_implements_it() -> None:
    for architecture, (file, _) in native_rows().items():
        module = ARCHITECTURES[architecture].partition(":")[0].rpartition(".")[2]
        assert (DOCUMENT.parent / file).resolve().is_file()
        assert Path(file).name == f"{module}.py"


def test_every_parity_test_is_named_once_by_the_architecture_it_proves() -> None:
    cases = parity_cases()
    named = [name for _, names in native_rows().values() for name in names]
    assert sorted(named) == sorted(cases)
    for architecture, (_, names) in native_rows().items():
        if architecture in PROVED_ELSEWHERE:
            assert not names
            continue
        families = {cases[name] for name in names}
        assert len(families) == 1, f"{architecture} is proved by tests of {families}"


def test_the_parity_test_is_called_what_the_table_says() -> None:
    function = re.search(r"test_parity\.py\)`::(\w+)`", DOCUMENT.read_text(encoding="utf-8"))
    assert function is not None
    assert f"def {function.group(1)}(checkpoint:" in PARITY.read_text(encoding="utf-8")
