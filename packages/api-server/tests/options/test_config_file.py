"""`--config FILE`: what the file may say, and that the command line wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmstack_server.options.config_file import MAX_FILE_BYTES, read_config_file


def write(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            "port: 8001\nmax_model_len: 4k\nmax-num-seqs: 4",
            {"--port": 8001, "--max-model-len": "4k", "--max-num-seqs": 4},
        ),
        ("model_tag: gpt2", {"--model": "gpt2"}),
        ("served-model-name: [a, b]", {"--served-model-name": ["a", "b"]}),
        ("speculative_config.num_speculative_tokens: 3", {"--speculative-config.num_speculative_tokens": 3}),
        ("speculative_config: {method: ngram}", {"--speculative-config": {"method": "ngram"}}),
        ("enable-log-requests: true\nseed:", {"--enable-log-requests": True, "--seed": None}),
        ("--max-model-len: 4", {"--max-model-len": 4}),
        ("<<: {port: 1}\nhost: a", {"--port": 1, "--host": "a"}),
        ("", {}),
        ("# nothing yet\n", {}),
    ],
)
def test_keys_are_flags_in_either_spelling(tmp_path: Path, text: str, settings: dict[str, Any]):
    assert read_config_file(write(tmp_path, text)).flag_to_value == settings


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- port", "must map options to values"),
        ("8000", "must map options to values"),
        ("1: 2", "must map options to values"),
        ("port: [", "it is not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "it is not valid YAML"),
        ("max-model-len: 4\nmax_model_len: 5", "set twice"),
        ("port: 1\nhost: a\nport: 2", "'port' is set twice"),
        ("a: " + "b" * MAX_FILE_BYTES, "more than"),
    ],
)
def test_what_is_no_mapping_of_flags_is_refused(tmp_path: Path, text: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        read_config_file(write(tmp_path, text))


def test_a_missing_file_is_refused():
    with pytest.raises(ValueError, match="No such file"):
        read_config_file("/nowhere/serve.yaml")
