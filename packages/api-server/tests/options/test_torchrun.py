"""Options of the processes that torchrun starts."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from llmstack_llm.options.resolve import Settings
from llmstack_server.commands.subcommands import ServeCommand
from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.torchrun import has_nothing_to_do, with_torchrun

LAUNCHED = ("--distributed-executor-backend", "external_launcher")


def environment(machines: tuple[int, int] = (1, 0), processes: tuple[int, int] = (1, 0)) -> dict[str, str]:
    """What torchrun sets: numbers of machines and of processes on this one, each with the number of this one."""
    return {
        "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
        "GROUP_WORLD_SIZE": str(machines[0]), "GROUP_RANK": str(machines[1]),
        "LOCAL_WORLD_SIZE": str(processes[0]), "LOCAL_RANK": str(processes[1]),
    }  # fmt: skip


def settings(variables: dict[str, str], *line: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return with_torchrun(settings_from(parser.parse_args(line), variables), variables)


def placed(found: Settings) -> tuple[Any, ...]:
    return found["nnodes"], found["node_rank"], found["master_addr"]


def test_machines_are_those_of_torchrun() -> None:
    found = settings(environment((2, 1)), "-pp", "2", *LAUNCHED)
    assert placed(found) == (2, 1, "10.0.0.1")
    assert [found.source(key) for key in ("nnodes", "node_rank", "master_addr")] == ["torchrun"] * 3
    assert found.problems == []
    assert "torchrun" in found.table()


def test_options_that_are_given_stay() -> None:
    given = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.9", *LAUNCHED)
    assert placed(settings(environment((2, 1)), *given)) == (2, 0, "10.0.0.9")
    assert placed(settings(environment((2, 1)), "--master-addr", "10.0.0.9", *LAUNCHED)) == (2, 1, "10.0.0.9")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, LAUNCHED),
        (environment((2, 1)), ()),
        (environment((2, 1)) | {"GROUP_RANK": "one"}, LAUNCHED),
    ],
)
def test_other_environments_and_launchers_change_nothing(variables: dict[str, str], line: tuple[str, ...]) -> None:
    found = settings(variables, *line)
    assert placed(found) == (1, 0, None)
    assert not has_nothing_to_do(found, variables)


def test_the_first_process_of_a_machine_starts_all_ranks_of_it() -> None:
    line = ("-tp", "2", *LAUNCHED)
    first, second = (environment(processes=(2, number)) for number in (0, 1))
    assert not has_nothing_to_do(settings(first, *line), first)
    assert has_nothing_to_do(settings(second, *line), second)
    assert settings(first, *line).problems == settings(second, *line).problems == []


def test_another_number_of_processes_than_ranks_is_refused_with_both() -> None:
    (problem,) = settings(environment(processes=(3, 0)), "-tp", "2", *LAUNCHED).problems
    assert problem == (
        "torchrun has started 3 processes on each of 1 machines, but --tensor-parallel-size 2 and "
        "--pipeline-parallel-size 1 are 2 ranks: give --nproc-per-node 1, or the ranks of a machine"
    )


def test_a_process_with_nothing_to_do_ends_with_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(processes=(2, 1)).items():
        monkeypatch.setenv(name, value)
    parser, command = argparse.ArgumentParser(), ServeCommand()
    command.add_arguments(parser)
    namespace = parser.parse_args(["-tp", "2", *LAUNCHED])
    assert command.problems(namespace) == []
    assert command.run(namespace) == 0
    assert capsys.readouterr().err == (
        "llmstack serve: info: process 1 of this machine ends: the first starts all ranks\n"
    )
