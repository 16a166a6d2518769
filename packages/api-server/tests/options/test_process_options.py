"""Which processes a command line asks for, and which ones contradict each other."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.resolve import Settings
from llmstack_server.options.command_line import SERVE_OPTIONS, add_serve_arguments, settings_from
from llmstack_server.options.config import ServeConfig, config_from
from llmstack_server.options.errors import ServeError
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.serving.launcher import demo_model_path
from llmstack_types import EngineStartError, RankPlacement


def config(*line: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from(settings_from(parser.parse_args(["m", *line]), {}))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], ProcessConfig()),
        (["--api-server-count", "3"], ProcessConfig(num_api_servers=3)),
        (["--api-server-count", "0"], ProcessConfig(num_api_servers=0, is_headless=True)),
        (["--headless"], ProcessConfig(is_headless=True)),
        (["--disable-frontend-multiprocessing"], ProcessConfig(is_multiprocess=False)),
        (["--enable-sleep-mode", "--uds", "/s"], ProcessConfig(has_sleep_mode=True)),
        (["--idle-sleep", "10m"], ProcessConfig(idle_sleep_s=600.0)),
        (["--idle-sleep", "1.5h", "--idle-sleep-level", "2"], ProcessConfig(idle_sleep_s=5400.0, idle_sleep_level=2)),
        (["--idle-sleep", "90"], ProcessConfig(idle_sleep_s=90.0)),
        (["--idle-sleep", "0"], ProcessConfig()),
        (
            ["--headless", "-dp", "2", "--engine-address", "ipc:///a", "ipc:///b"],
            ProcessConfig(is_headless=True, engine_addresses=("ipc:///a", "ipc:///b")),
        ),
        (["--engine-address", "ipc:///a", "ipc:///b"], ProcessConfig(engine_addresses=("ipc:///a", "ipc:///b"))),
    ],
)
def test_flags_say_how_many_processes_there_are(line: list[str], expected: ProcessConfig):
    assert config(*line).processes == expected
    assert config(*line).processes.is_attached == (bool(expected.engine_addresses) and not expected.is_headless)


HOSTS = ["-dp", "4"]
EXTERNAL = ["--distributed-executor-backend", "external_launcher"]
NODES = [*EXTERNAL, "--nnodes", "2"]
KEYS = ["--cluster-key-file", "keys"]
MASTER = ["--master-addr", "10.0.0.1", *KEYS]
JOINED = ["--data-parallel-address", "10.0.0.1", *KEYS]


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (["--headless", "--api-server-count", "2"], ["--headless", "--api-server-count 2"]),
        (["--disable-frontend-multiprocessing", "--headless"], ["--disable-frontend-multiprocessing", "--headless"]),
        (["--disable-frontend-multiprocessing", "-asc", "2"], ["--api-server-count 2"]),
        (["--disable-frontend-multiprocessing", "-dp", "2"], ["--data-parallel-size 2"]),
        (["--disable-frontend-multiprocessing", "--engine-address", "ipc:///a"], ["--engine-address"]),
        (["--engine-address", "ipc:///a", "ipc:///a"], ["--engine-address", "twice"]),
        (["--headless", "-dp", "2", "--engine-address", "ipc:///a"], ["--engine-address", "--data-parallel-size 2"]),
        (["-dp", "3", "--engine-address", "ipc:///a", "ipc:///b"], ["--engine-address", "--data-parallel-size 3"]),
        (["--headless", "--engine-address", "ipc:///a", "ipc:///b"], ["--data-parallel-size 1"]),
        (
            ["-dp", "1000"],
            ["--data-parallel-size: 1000 engine cores and their ranks are 1000 processes here, and at most"],
        ),
        (["-dp", "30", "-tp", "4"], ["30 engine cores and their ranks are 120 processes here, and at most"]),
        ([*HOSTS, "-dpl", "1"], ["--data-parallel-size-local 1 of --data-parallel-size 4", "--data-parallel-address"]),
        ([*HOSTS, "-dpl", "1", "-dpa", "10.0.0.1"], ["needs --cluster-key-file"]),
        ([*HOSTS, "-dpl", "3", "-dpr", "2", "--headless"], ["--data-parallel-start-rank 2", "exceed"]),
        ([*HOSTS, *JOINED, "-dpl", "2", "-dpr", "2"], ["--data-parallel-start-rank 2 needs --headless"]),
        ([*HOSTS, *JOINED, "-dpl", "0", "--headless"], ["would do nothing"]),
        ([*HOSTS, "-dpb", "ray"], ["ray needs --data-parallel-address", "ray needs --cluster-key-file"]),
        ([*HOSTS, *JOINED, "-dpb", "ray", "-dpl", "2"], ["--data-parallel-backend ray", "Ray decides"]),
        (
            [*HOSTS, *JOINED, "-dpb", "ray", "--headless"],
            ["--data-parallel-backend ray", "Ray starts the engine cores"],
        ),
        ([*HOSTS, *JOINED, "-dpl", "2", "--engine-address", "ipc:///a", "ipc:///b"], ["join by themselves"]),
        (
            ["-pp", "2", "--nnodes", "2", "--distributed-executor-backend", "uni"],
            ["--nnodes 2 needs --distributed-executor-backend external_launcher"],
        ),
        (["-pp", "2", "--nnodes", "2"], ["--nnodes 2 needs --master-addr"]),
        (["-pp", "2", *NODES, *KEYS], ["--nnodes 2 needs --master-addr"]),
        (["-pp", "2", *NODES, "--master-addr", "10.0.0.1"], ["--nnodes 2 needs --cluster-key-file"]),
        (["-tp", "2", *NODES, *MASTER], ["--tensor-parallel-size 2 over", "needs --trust-cluster-network"]),
        (["-tp", "3", *NODES, *MASTER], ["--nnodes 2 cannot share the 3 ranks of --tensor-parallel-size 3"]),
        (["-pp", "2", *NODES, *MASTER, "--node-rank", "2"], ["--node-rank 2 is too large for --nnodes 2"]),
        (["-pp", "2", *NODES, *MASTER, "-dp", "2"], ["--nnodes 2 and --data-parallel-size-local 2 exclude"]),
        (["-pp", "2", *NODES, *MASTER, *HOSTS, *JOINED, "-dpb", "ray"], ["--nnodes 2 and --data-parallel-backend ray"]),
        (["-pp", "2", *NODES, *MASTER, "--engine-address", "ipc:///a"], ["--engine-address and --nnodes 2 exclude"]),
        (
            ["-pp", "2", *NODES, *MASTER, *HOSTS, *JOINED, "-dpl", "1", "--master-port", "29550"],
            ["--master-port and --data-parallel-rpc-port are both 29550"],
        ),
        (["--idle-sleep", "10m", "-asc", "2"], ["--idle-sleep and --api-server-count 2 exclude"]),
        (["--idle-sleep", "10m", "--headless"], ["--idle-sleep and --headless exclude"]),
        (["--idle-sleep", "10m", "--engine-address", "ipc:///a"], ["--idle-sleep and --engine-address exclude"]),
        (["--idle-sleep", "soon"], ["--idle-sleep: 'soon' is not a time such as 90s, 10m or 2h"]),
        (["--idle-sleep", "0.5s"], ["--idle-sleep: must be"]),
        (["--distributed-executor-backend", "ray"], ["ray has no ranks to place; --data-parallel-backend ray"]),
        (
            ["-tp", "2", "--distributed-executor-backend", "ray"],
            ["ray needs --trust-cluster-network", "ray needs --cluster-key-file"],
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_name(line: list[str], flags: list[str]):
    with pytest.raises(ServeError) as caught:
        config(*line)
    assert caught.value.exit_code == 2
    assert all(flag in str(caught.value) for flag in flags)


def engine_of(*line: str) -> EngineArgs:
    return replace(config(*line).engine, model=demo_model_path())


def test_machines_that_share_a_model_are_placed_and_the_default_is_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_key_file(tmp_path / "keys")
    placement = engine_of("-pp", "2", *NODES, *MASTER, "--node-rank", "1").create_engine_config()[1].model.placement
    assert placement == RankPlacement(
        "external_launcher", 2, 1, "tcp://10.0.0.1:29501", os.path.abspath("keys"), "", 5.0
    )
    for line in (["-tp", "2"], ["-tp", "2", *EXTERNAL]):
        assert engine_of(*line).create_engine_config()[1].model.placement is None


def test_keys_and_interfaces_that_cannot_be_used_are_refused_before_anything_is_started(tmp_path: Path):
    (tmp_path / "junk").write_text("keys")
    (tmp_path / "junk").chmod(0o600)
    make_key_file(tmp_path / "keys")
    ranks, engines = ["-tp", "2", *NODES, *MASTER, "--trust-cluster-network"], [*HOSTS, *JOINED, "-dpl", "2"]
    for line in ([*ranks, "lo"], engines):
        for name, sentence in (("none", "cannot be read: No such file"), ("junk", "must hold two keys")):
            with pytest.raises(EngineStartError, match=f"^the key file .*{name} {sentence}"):
                engine_of(*line, "--cluster-key-file", str(tmp_path / name)).create_engine_config()
    with pytest.raises(EngineStartError, match=r"^--trust-cluster-network nowhere: this machine has no such network"):
        engine_of(*ranks, "nowhere", "--cluster-key-file", str(tmp_path / "keys")).create_engine_config()


def test_a_size_reaches_the_engine():
    assert config("--data-parallel-size", "2").engine.data_parallel_size == 2


def test_another_process_makes_the_same_configuration_of_the_flags_as_json():
    line = ["--api-server-count", "2", "--max-model-len", "4k", "--served-model-name", "a", "b", "--api-key", "secret"]
    first = config(*line)
    again = config_from(Settings.from_plain(SERVE_OPTIONS, json.loads(json.dumps(first.settings.to_plain()))))
    assert again.http.api_keys[0].matches(b"secret")
    for name in ("served_model_names", "engine", "processes", "observability", "chat", "warnings"):
        assert getattr(again, name) == getattr(first, name)
    assert json.dumps(again.settings.to_plain()) == json.dumps(first.settings.to_plain())
    assert "secret" not in repr(first)


def test_what_changes_nothing_is_said():
    assert any("--enable-sleep-mode" in line for line in config("--enable-sleep-mode").warnings)
    lines = config("--headless", "--ui", "--port", "8001", "--host", "0.0.0.0").warnings
    (line,) = [line for line in lines if "--headless" in line]
    assert line.endswith("no effect: --host, --port, --ui")
    assert not any("NO API KEY" in line for line in config("--headless", "--host", "0.0.0.0").warnings)
    assert any("running engine cores" in line for line in config("--engine-address", "ipc:///a").warnings)
