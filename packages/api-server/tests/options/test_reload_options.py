"""What a reload may choose is a list of names, and what excludes a second engine core is refused by name."""

from __future__ import annotations

import argparse

import pytest

from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import ServeConfig, config_from
from llmstack_server.options.errors import ServeError
from llmstack_server.options.reload_options import ReloadEntry, ReloadOptions

NODES = ["-pp", "2", "-n", "2", "--master-addr", "h", "--cluster-key-file", "k"]
NODES += ["--distributed-executor-backend", "external_launcher"]


def config(*line: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from(settings_from(parser.parse_args(["m", "--reload-models", "next=/models/next", *line]), {}))


def test_several_processes_of_one_machine_can_reload() -> None:
    found = config("--api-server-count", "2", "-dp", "2", "-tp", "2", "-pp", "2")
    assert (found.engine.can_reload, found.processes.num_api_servers, found.engine.num_ranks) == (True, 2, 4)


def test_machines_with_engine_cores_of_one_endpoint_can_reload() -> None:
    assert config(*HOSTS).engine.can_reload
    other = config(*HOSTS, "-dpr", "1", "--headless")
    assert [*other.reload.entries] == ["start", "next"]
    assert not any("--reload-models" in line for line in other.warnings)


def test_an_entry_is_a_model_or_an_object_with_settings_and_adapters() -> None:
    found = config(
        '{"name": "small", "max_model_len": 64}', '{"name": "styled", "lora_modules": {"s": "/s"}}', "--enable-lora"
    )
    assert found.engine.can_reload
    assert dict(found.reload.entries) == {
        "start": ReloadEntry("start"),
        "next": ReloadEntry("next", "/models/next"),
        "small": ReloadEntry("small", settings={"max_model_len": 64}),
        "styled": ReloadEntry("styled", adapters=(("s", "/s"),)),
    }
    assert any("--reload-models opens no route" in line for line in found.warnings)


RAY = ["-dp", "2", "--data-parallel-backend", "ray", "-dpa", "127.0.0.1", "--cluster-key-file", "k"]
HOSTS = ["-dp", "2", "-dpl", "1", "-dpa", "127.0.0.1", "--cluster-key-file", "k"]


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        (["--engine-address", "ipc:///a"], "--engine-address"),
        (["--headless"], "--headless"),
        (["--disable-frontend-multiprocessing"], "--disable-frontend-multiprocessing"),
        ([*HOSTS, "--api-server-count", "2"], "--api-server-count"),
        (RAY, "--data-parallel-backend"),
        (NODES, "--distributed-executor-backend"),
        (["--record-steps", "f"], "--record-steps"),
        (["--max-engine-restarts", "0"], "--max-engine-restarts"),
        (['{"name": "styled", "lora_modules": {"s": "/s"}}'], "--enable-lora"),
    ],
)
def test_what_excludes_a_second_engine_core_is_refused_by_name(line: list[str], flag: str) -> None:
    with pytest.raises(ServeError) as caught:
        config(*line)
    assert flag in str(caught.value)
    assert "--reload-models" in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["next"], "neither name=model"),
        (["a=/m", "a=/n"], "given twice"),
        (["start=/m"], "given twice"),
        (['{"name": "a", "max_num_seqs": 4}'], "needs a restart"),
        (['{"name": "a", "lora_modules": ["b"]}'], "must be an object"),
        (['{"name": "a/b"}'], "has no name"),
        (["{"], "not valid JSON"),
    ],
)
def test_a_list_that_no_reload_could_use_is_refused_at_the_start(texts: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ReloadOptions(reload_models=tuple(texts))


@pytest.mark.parametrize(
    ("line", "other"),
    [
        (("--reload-models", "next=/models/next"), "--reload-models"),
        (("--api-server-count", "2"), "--api-server-count"),
        (("-dp", "2"), "--data-parallel-size"),
    ],
)
def test_what_excludes_a_change_of_weights_in_place_is_named(line: tuple[str, ...], other: str) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    given = ["m", "--weight-update-dir", "/weights"]
    settings = settings_from(parser.parse_args([*given, "--enable-control-routes"]), {})
    assert config_from(settings).reload.changes_weights
    assert "opens no routes" in config_from(settings_from(parser.parse_args(given), {})).warnings[-1]
    with pytest.raises(ServeError, match=f"--weight-update-dir and {other} exclude each other"):
        config_from(settings_from(parser.parse_args([*given, *line]), {}))


@pytest.mark.parametrize("line", [("-tp", "2"), ("-pp", "2")])
def test_the_weights_of_several_ranks_can_be_changed_in_place(line: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    given = ["m", "--weight-update-dir", "/weights", "--enable-control-routes", *line]
    assert config_from(settings_from(parser.parse_args(given), {})).reload.changes_weights
