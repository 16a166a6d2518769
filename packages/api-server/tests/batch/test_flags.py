"""Which flags of the server a batch takes over."""

from __future__ import annotations

import argparse

import pytest

from llmstack_server.batch.errors import BatchError
from llmstack_server.batch.flags import SERVER_GROUPS, add_batch_arguments, check_flags_for_url, serve_namespace
from llmstack_server.config import config_from
from llmstack_server.environment import Environment
from llmstack_server.flags import add_serve_arguments


def parse(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_batch_arguments(parser)
    return parser.parse_args(["-i", "in", "-o", "out", *line])


def test_the_groups_that_are_left_out_exist():
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    assert {group.title for group in parser._action_groups} >= SERVER_GROUPS


def test_flags_about_the_model_are_the_servers():
    namespace = serve_namespace(parse("gpt2", "--max-num-seqs", "7", "--dtype", "float32", "--log-level", "debug"))
    config = config_from(namespace, Environment())
    assert (config.model, config.dtype, config.engine["max_num_seqs"]) == ("gpt2", "float32", 7)
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
    check_flags_for_url(parse("--url", "http://x", "--api-key", "k", "--max-concurrency", "3"))
    with pytest.raises(BatchError, match=f"^{flag}: "):
        check_flags_for_url(parse("--url", "http://x", *line))
