"""Tests of `tools/check_prose.py`: each fault in a made file is found, and the field's own words are left alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
Complaints = Callable[[str, str], list[str]]
LONG = " ".join(["Word", *["word"] * 25])


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    """The command as a module: a process for each text would compile the word list each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("check_prose")


@pytest.fixture
def complaints(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Complaints:
    """What the command says about one file, without the file's name."""

    def complain(name: str, text: str) -> list[str]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["check_prose.py", "--root", str(tmp_path), name])
        code = tool.main()
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(name)]
        assert code == (1 if lines else 0)
        return [line.removeprefix(f"{name}:") for line in lines]

    return complain


@pytest.mark.parametrize(
    "text",
    [
        '"""A module whose keys are turned by an angle."""\n',
        "x = 1\n# tokens that are barred\n",
        "x = 1  # the first maximum of a row\n",
        "# a wrapper that stands\n# around the scheduler\nx = 1\n",
        'raise ValueError("the engine was told of no request")\n',
        'raise ValueError(f"{1 + 1} requests: nobody waits for them")\n',
        "def turned_keys(): ...\n",
        "# it waits; yes.\nx = 1\n",
        "class CpuTwin: ...\n",
        "def f(heard=()): ...\n",
        "class A:\n    keeps_promises = True\n",
        "def test_a_request_that_engine_cores_die_of_is_found(): ...\n",
        'def f():\n    """Rows 11 and 13; the parameter is named."""\n',
    ],
)
def test_a_banned_expression_is_found_in_docstrings_comments_messages_and_names(
    complaints: Complaints, text: str
) -> None:
    found = complaints("packages/p/src/m.py", text)
    assert len(found) == 1
    assert ": write " in found[0]


@pytest.mark.parametrize(
    "text",
    [
        '"""A chat of two turns, in turn."""\n',
        '"""A progress bar; `barred` is the name of an argument elsewhere."""\n',
        '"""The step log records each step."""\n',
        "class StepRecording: ...\nnum_recorded_steps = 512\n",
        '"""The masks of some rows, which become row 0 of the logits."""\n',
        '"""A headless server runs engine cores without HTTP."""\n',
        "print(logits.barred, span.told)\n",
        "x = 'barred'\n",
        '"""See https://example.com/told and bring up the server."""\n',
    ],
)
def test_the_terms_of_the_field_and_the_names_of_others_pass(complaints: Complaints, text: str) -> None:
    assert complaints("packages/p/src/m.py", text) == []


def test_strings_of_tests_are_data(complaints: Complaints) -> None:
    assert complaints("packages/p/tests/test_m.py", "x = 'He told a story to nobody.'\n") == []


def test_a_complaint_names_the_line_of_the_expression(complaints: Complaints) -> None:
    text = '"""Module of one function."""\n\n\ndef f():\n    """Says a thing.\n\n    And then brings it.\n    """\n'
    assert [line.split(":")[0] for line in complaints("packages/p/src/m.py", text)] == ["7"]


@pytest.mark.parametrize("start", ["What", "Those of", "The same of", "How many", "So many", "Of each", "From now on"])
def test_a_docstring_that_begins_with_a_pronoun_is_refused_in_sources(complaints: Complaints, start: str) -> None:
    text = f'"""Module with one function."""\n\n\ndef f():\n    """{start} blocks that are free."""\n'
    assert any("begin with the noun" in line for line in complaints("packages/a/src/b.py", text))
    assert complaints("packages/a/tests/b.py", text) == []
    text = text.replace(start, "The same number of")
    assert complaints("packages/a/src/b.py", text) == []


@pytest.mark.parametrize("docstring", ["Yes.", "The fields.", "Sums three numbers."])
def test_a_docstring_of_three_words_or_fewer_is_refused_in_sources(complaints: Complaints, docstring: str) -> None:
    text = f'"""Module with one function."""\n\n\ndef f():\n    """{docstring}"""\n'
    assert any("say something or leave it out" in line for line in complaints("packages/p/src/m.py", text))
    assert not any("leave it out" in line.split(";")[0] for line in complaints("packages/p/tests/m.py", text))


@pytest.mark.parametrize("first", ["x" * 20 + " " + "y" * 60, "Two lines\nthat are one paragraph."])
def test_a_modules_first_line_is_one_line_of_80_characters(complaints: Complaints, first: str) -> None:
    found = complaints("packages/p/src/m.py", f'"""{first} More words here."""\n')
    assert found == ["1: the module's docstring starts with one line of at most 80 characters"]
    assert complaints("packages/p/src/m.py", '"""A noun phrase of four.\n\nAnd more\nbelow."""\n') == []


def test_a_long_sentence_of_a_page_is_found_wherever_its_line_breaks_are(complaints: Complaints) -> None:
    page = f"# Title\n\nShort one. {LONG[:40]}\n{LONG[40:]}. Another.\n"
    assert complaints("docs/page.md", page) == [
        '3: a sentence of 26 words, 25 at most: "Word word word word word word …"'
    ]


@pytest.mark.parametrize(
    "page",
    [
        f"```\n{LONG}\n```\n",
        f"Short.\n\n    {LONG}\n\nShort.\n",
        f"| {LONG} |\n|---|\n",
        f"- {LONG[:60]}\n- {LONG[:60]}\n- {LONG[:60]}\n",
        f"{LONG[:60]}. {LONG[:60]}. `{LONG}` {LONG[:60]}.\n",
        f"[{LONG[:60]}](https://example.com/a.b.c.d) and on.\n",
    ],
)
def test_code_tables_addresses_and_list_items_make_no_long_sentence(complaints: Complaints, page: str) -> None:
    assert complaints("docs/page.md", page) == []


def test_an_indented_paragraph_of_a_list_is_no_code(complaints: Complaints) -> None:
    assert len(complaints("docs/page.md", f"- Item.\n\n    {LONG}.\n")) == 1


def test_tables_are_held_to_the_word_list(complaints: Complaints) -> None:
    assert len(complaints("docs/page.md", "| a | what the server is told |\n|---|---|\n")) == 1


@pytest.mark.full  # `make check` runs the same command
def test_the_files_of_the_tuple_and_the_glossary_are_in_order() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "check_prose.py")], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout
