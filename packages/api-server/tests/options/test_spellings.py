"""Flags and switches as other programs, and older versions of vLLM, spell them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from llmstack_command.parser import CommandParser
from llmstack_llm.options.resolve import Settings
from llmstack_server.options.command_line import add_serve_arguments, settings_from


def settings_of(*line: str) -> Settings:
    parser = CommandParser(prog="llmstack serve", description="")
    add_serve_arguments(parser)
    return settings_from(parser.parse_line(["org/m", *line]), {})


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("--rope-theta 1e4", "hf_overrides", {"rope_theta": 1e4}),
        ("""--rope_scaling='{"factor": 2.0}' --hf-overrides '{"a": 1}'""", "hf_overrides",
         {"rope_scaling": {"factor": 2.0}, "a": 1}),
        ("--guided-decoding-backend guidance", "structured_outputs_config", {"backend": "guidance"}),
        ("--spec-method ngram --spec-tokens 3", "speculative_config", ("ngram", 3, 4)),
        ("--speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 2", "speculative_config",
         ("ngram", 4, 2)),
        ("--device cpu", "device", "cpu"), ("--cuda-graph-sizes 1 2", "cudagraph_capture_sizes", (1, 2)),
        ("--kv-cache-memory 1G", "kv_cache_memory_bytes", 1 << 30),
        ("""--override-pooler-config '{"pooling_type": "MEAN"}'""", "pooler_config", {"pooling_type": "MEAN"}),
        ("--enable-prefix-caching=False", "enable_prefix_caching", False), ("--enable-lora=true", "enable_lora", True),
        ("--enable-chunked-prefill False", "enable_chunked_prefill", False),
        ("--no-enable-chunked-prefill=false", "enable_chunked_prefill", True),
    ],
)  # fmt: skip
def test_other_spellings_of_published_lines_mean_the_same(line: str, key: str, value: Any):
    found = settings_of(*shlex.split(line))
    assert found.problems == []
    config = found[key]
    if key == "speculative_config":
        config = config["method"], config["num_speculative_tokens"], config["prompt_lookup_max"]
    assert config == value


def test_a_flag_of_one_key_is_a_key_of_a_file_as_well(tmp_path: Path):
    file = tmp_path / "options.yaml"
    file.write_text("rope-theta: 10000\nspec_method: ngram\nnum-speculative-tokens: 3", encoding="utf-8")
    settings = settings_of("--config", str(file))
    assert settings["hf_overrides"] == {"rope_theta": 10000}
    assert settings["speculative_config"]["num_speculative_tokens"] == 3


def test_another_compiler_of_constraints_is_named_in_a_warning():
    found = settings_of("--structured-outputs-config", '{"backend": "xgrammar:no-fallback"}')
    expected = "--structured-outputs-config: backend xgrammar has no effect: llguidance compiles every constraint"
    assert expected in found.warnings
