"""The flags that a batch shares with the server."""

from __future__ import annotations

import argparse

import pytest

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.commands.batch.flags import SERVER_TITLES, add_batch_arguments, read_options
from llmstack_server.options.command_line import SERVE_OPTIONS


def parse(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_batch_arguments(parser)
    return parser.parse_args(["-i", "in", "-o", "out", *line])


def test_the_themes_that_are_left_out_exist():
    assert {option.title for option in SERVE_OPTIONS} >= SERVER_TITLES


def test_flags_about_the_model_are_the_servers():
    namespace = parse("gpt2", "--max-num-seqs", "7", "--dtype", "float32", "--log-level", "debug")
    _, config = read_options(namespace, {"LLMSTACK_BLOCK_SIZE": "8", "LLMSTACK_PORT": "no port"})
    assert config is not None
    assert (config.model, config.engine.dtype, config.engine.max_num_seqs) == ("gpt2", "float32", 7)
    assert config.engine.block_size == 8
    assert config.http.log_level == "debug"


@pytest.mark.parametrize("flag", ["--port", "--ssl-keyfile", "--headless"])
def test_flags_about_connections_are_unknown(flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(flag, "1")
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "flag"),
    [(["gpt2"], "model"), (["--model", "gpt2"], "--model"), (["--max-num-seqs", "7"], "--max-num-seqs")],
)
def test_a_server_elsewhere_has_a_model_of_its_own(line: list[str], flag: str):
    environment = {"LLMSTACK_MAX_NUM_SEQS": "9"}
    options, config = read_options(parse("--url", "http://x", "--api-key", "k", "--max-concurrency", "3"), environment)
    assert (options.url, options.api_key, options.max_concurrency, config) == ("http://x", "k", 3, None)
    with pytest.raises(BatchError, match=f"^{flag}: "):
        read_options(parse("--url", "http://x", *line), environment)


def test_all_options_at_fault_are_reported_together():
    parser = argparse.ArgumentParser()
    add_batch_arguments(parser)
    with pytest.raises(BatchError) as caught:
        read_options(
            parser.parse_args(["-i", "in", "--max-concurrency", "0", "--dtype", "int3", "--enable-lora-bias"]), {}
        )
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "--max-concurrency", "--output-file is required", "--enable-lora-bias", "--dtype",
    ]  # fmt: skip
