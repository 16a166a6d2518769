"""Each command of the page on deployment is one; the tests of its sections run them with other values."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest
from page_commands import commands_of
from torch.distributed.run import get_args_parser as torchrun_parser

from llmstack_engine_client.commands.cluster_key import ClusterKeyCommand
from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import config_from

ROOT = Path(__file__).resolve().parents[1]
PAGE = "deployment.md"


def check_serve(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    config_from(settings_from(parser.parse_args(words), {}))


def check_torchrun(words: list[str]) -> None:
    """What follows the launcher's own options is a command."""
    command = words[words.index("llmstack") :]
    CHECKS[command[0], command[1]](command[2:])


def check_key(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    ClusterKeyCommand().add_arguments(parser)
    parser.parse_args(words)


def check_install(words: list[str]) -> None:
    (requirement,) = words
    name, extra = re.fullmatch(r"llmstack-([a-z-]+)\[(\w+)\]", requirement).groups()  # type: ignore[union-attr]
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]


def check_container(words: list[str]) -> None:
    """The image cannot be built here; what follows its name are arguments of `llmstack serve`."""
    check_serve(words[words.index("llmstack") + 1 :])


def check_build(words: list[str]) -> None:
    assert words == ["--tag", "llmstack", "."]
    assert (ROOT / "Dockerfile").exists()


def check_compose(words: list[str]) -> None:
    assert (words[0], words[2:]) == ("--file", ["up", "--build"])
    assert (ROOT / words[1]).exists()


def check_ray(words: list[str]) -> None:
    """Ray is not installed with the developers' tools; the page has its documented words."""
    assert words in ([], ["--generate"], ["--head", "--port", "6379"])


CHECKS = {
    ("llmstack", "serve"): check_serve, ("llmstack", "cluster-key"): check_key, ("pip", "install"): check_install,
    ("docker", "run"): check_container, ("docker", "build"): check_build, ("docker", "compose"): check_compose,
    ("ray", "get-auth-token"): check_ray, ("ray", "start"): check_ray, ("export", "RAY_AUTH_MODE=token"): check_ray,
    ("torchrun", "--nproc-per-node"): check_torchrun, ("torchrun", "--nnodes"): check_torchrun,
}  # fmt: skip


@pytest.mark.parametrize("words", commands_of(PAGE), ids=" ".join)
def test_each_command_of_the_page_is_one(words: list[str]) -> None:
    CHECKS[words[0], words[1]](words[2:])


def test_every_long_option_of_the_page_is_one_of_a_command_that_it_names() -> None:
    known = set(torchrun_parser()._option_string_actions)
    for add in (add_serve_arguments, ClusterKeyCommand().add_arguments):
        parser = argparse.ArgumentParser()
        add(parser)
        known |= set(parser._option_string_actions)
    text = re.sub(r"^```\w*\n.*?^```$", "", (ROOT / "docs" / PAGE).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if flag not in known} == set()


def test_the_commands_that_replace_keys_do_so_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contents = []
    for words in [words[2:] for words in commands_of(PAGE, "Several machines") if words[1] == "cluster-key"][:4]:
        parser = argparse.ArgumentParser()
        ClusterKeyCommand().add_arguments(parser)
        assert ClusterKeyCommand().run(parser.parse_args(words)) == 0
        contents.append((tmp_path / words[0]).read_text().split())
    first, both, switched, last = contents
    assert (both[:2], switched, last) == (first, both[2:] + both[:2], both[2:])
