"""Lines of the log: text with the time and the process, or JSON objects."""

from __future__ import annotations

import json
import logging
import sys

from llmstack_types.log_lines import LogFormatter, log_format_in_use


def record(level: int = logging.INFO, message: str = "loaded %s", *args: object) -> logging.LogRecord:
    return logging.LogRecord("llmstack.part", level, __file__, 1, message, args or ("it",), None)


def test_text_names_time_level_process_and_logger() -> None:
    line = LogFormatter("text", "engine-core 7").format(record())
    time, rest = line.split(" ", 1)
    assert len(time.split(":")) == 3
    assert rest == "INFO    (engine-core 7) llmstack.part: loaded it"
    assert "(" not in LogFormatter().format(record())


def test_colours_are_for_warnings_on_a_terminal() -> None:
    shown = LogFormatter(has_color=True)
    assert shown.format(record(logging.WARNING)).startswith("\x1b[33m")
    assert "\x1b" not in shown.format(record())
    assert "\x1b" not in LogFormatter().format(record(logging.ERROR))


def test_json_is_one_object_per_line_whatever_the_message() -> None:
    formatter = LogFormatter("json", context=lambda: {"request_id": "r1"})
    line = formatter.format(record(logging.WARNING, "two\nlines %s", "\u2028"))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["time"].endswith("Z")
    del fields["time"]
    assert fields == {
        "level": "warning", "process": "server", "logger": "llmstack.part", "message": "two\nlines \u2028",
        "request_id": "r1",
    }  # fmt: skip


def test_json_has_the_traceback_of_an_exception() -> None:
    failed = record(logging.ERROR)
    try:
        raise ValueError("broken")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert json.loads(LogFormatter("json").format(failed))["exception"].endswith("ValueError: broken")


def test_the_format_in_use_is_that_of_the_root_logger() -> None:
    assert log_format_in_use() == "text"
    handler = logging.NullHandler()
    handler.setFormatter(LogFormatter("json"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        assert log_format_in_use() == "json"
    finally:
        root.removeHandler(handler)
