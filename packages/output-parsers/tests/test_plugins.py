"""Parsers of a user's own, as classes of modules and of files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmstack_output_parsers import HermesToolParser, UnknownParserError, check_parser, reasoning_parser, tool_parser
from llmstack_output_parsers.plugins import check_plugin, load_plugin

MINE = """
from llmstack_output_parsers import HermesToolParser, ThinkParser

class Mine(HermesToolParser):
    pass
"""
TWO = f"{MINE}\nclass Other(ThinkParser):\n    pass\n\nclass _Hidden(ThinkParser):\n    pass\n\nclass Data:\n    pass\n"


def test_a_file_with_one_parser_needs_no_name_of_a_class(tmp_path: Path):
    path = tmp_path / "parsers.py"
    path.write_text(MINE)
    found = tool_parser("anything", str(path))
    assert found.__name__ == "Mine"  # type: ignore[attr-defined]
    assert issubclass(found, HermesToolParser)  # type: ignore[arg-type]


def test_of_several_parsers_in_a_file_one_is_named(tmp_path: Path):
    path = tmp_path / "parsers.py"
    path.write_text(TWO)
    assert load_plugin(f"{path}:Other", "x").__name__ == "Other"
    assert reasoning_parser("Other", str(path)).__name__ == "Other"  # type: ignore[attr-defined]
    with pytest.raises(UnknownParserError, match=r"several parsers; name one as parsers.py:Mine$"):
        load_plugin(str(path), "x")


def test_a_check_executes_nothing(tmp_path: Path):
    path = tmp_path / "parsers.py"
    path.write_text(f"import sys\nsys.was_executed = True\n{MINE}")
    (tmp_path / "broken.py").write_text("raise SystemError('no')\nclass A: pass\n")
    for plugin in (str(path), f"{path}:Mine", str(tmp_path / "broken.py"), "json:JSONDecoder"):
        check_parser("mine", plugin, is_reasoning=False)
    assert not hasattr(sys, "was_executed")


def test_no_plug_in_is_looked_for_beside_a_name_of_this_package(tmp_path: Path):
    """Published lines name a file of another engine for a format that is built in."""
    missing = str(tmp_path / "nano_v3_reasoning_parser.py")
    check_parser("nano_v3", missing, is_reasoning=True)
    assert reasoning_parser("nano_v3", missing) is reasoning_parser("nano_v3")
    with pytest.raises(UnknownParserError, match="cannot be read"):
        check_parser("other", missing, is_reasoning=True)


def test_a_module_and_class_is_found_where_python_finds_it():
    assert load_plugin("llmstack_output_parsers:HermesToolParser", "x") is HermesToolParser


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "from vllm.tool_parsers import ToolParser\nclass A(ToolParser): pass\n",
            "is written for vllm, which it imports",
        ),
        ("def f():\n    import sglang.srt\nclass A: pass\n", "is written for sglang"),
        ("class A:\n", "is no Python"),
        ("\0", "is no Python"),
        ("x = 1\n", "has no class"),
        (f"{'(' * 5000}", "is no Python"),
        (f"#{' ' * (1 << 20)}", "bytes"),
    ],
)
def test_a_file_that_cannot_work_is_refused_unread(tmp_path: Path, text: str, reason: str):
    path = tmp_path / "parsers.py"
    path.write_text(text)
    with pytest.raises(UnknownParserError, match=reason) as caught:
        check_plugin(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("no_such_module:X", "there is no module 'no_such_module'"),
        ("__main__:X", "there is no module '__main__'"),
        ("llmstack_output_parsers:Nothing", "cannot be loaded: AttributeError"),
        ("llmstack_output_parsers", "is neither module:Class nor a file"),
        (":", "is neither module:Class nor a file"),
        ("absent.py", "'absent.py' cannot be read: No such file"),
        (f"{__file__}:Nothing", "has no class Nothing"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(plugin: str, reason: str):
    with pytest.raises(UnknownParserError, match=reason):
        tool_parser("anything", plugin)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class A: pass\n", "has no class with the methods feed and finish"),
        ("class A: pass\nraise SystemError('no')\n", "cannot be loaded: SystemError: no"),
    ],
)
def test_what_a_file_raises_ends_in_a_sentence(tmp_path: Path, text: str, reason: str):
    path = tmp_path / "raising.py"
    path.write_text(text)
    with pytest.raises(UnknownParserError, match=reason):
        load_plugin(str(path), "x")
    assert ("llmstack_plugin_raising" in sys.modules) == ("cannot be loaded" not in reason)
    sys.modules.pop("llmstack_plugin_raising", None)
