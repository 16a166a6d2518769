"""The command that makes and replaces the keys of machines."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from llmstack_engine_client.commands.cluster_key import ClusterKeyCommand
from llmstack_engine_core.ipc.keys import read_keys


def test_a_second_pair_is_accepted_then_used_then_the_only_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"

    def run(*options: str) -> int:
        parser = argparse.ArgumentParser()
        command = ClusterKeyCommand()
        command.add_arguments(parser)
        return command.run(parser.parse_args([str(path), *options]))

    assert run() == 0
    (first,) = read_keys(path).pairs
    assert run() == 1  # it is not made again
    assert run("--switch") == 1
    assert run("--add") == 0
    assert read_keys(path).pairs[0] == first
    assert run("--add") == 1
    assert run("--switch") == 0
    second, other = read_keys(path).pairs
    assert other == first
    assert run("--retire") == 0
    assert read_keys(path).pairs == (second,)
    assert path.stat().st_mode & 0o777 == 0o600
    shown = "".join(capsys.readouterr())
    assert not any(key.decode() in shown for pair in (first, second) for key in pair)
    assert repr(read_keys(path)) == "Keys()"
