"""Release tooling: the tag decides what is built, workflows call the Makefile alone, and the deployment files agree."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from tool_modules import load_tool

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_tool("release")


def test_a_tag_names_one_package_in_the_version_of_the_tree(release: ModuleType) -> None:
    package = release.read_package(ROOT / "packages" / "kv-cache")
    assert release.package_of(package.tag) == package
    for tag in ("kv-cache", "kv-cache-v99.0.0", "unknown-v0.2.0", "../kv-cache-v0.2.0", "v0.2.0", ""):
        with pytest.raises(ValueError, match="is not"):
            release.package_of(tag)


def test_a_package_without_a_date_is_not_released(
    release: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = release.read_package(ROOT / "packages" / "kv-cache")
    built: list[str] = []
    monkeypatch.setattr(release, "build_distributions", lambda found: built.append(found.name))
    changelog = "## [{}] - {}\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog.format(package.version, "unreleased"), encoding="utf-8")
    made = release.Package(tmp_path, package.name, package.version, package.requirements)
    monkeypatch.setattr(release, "package_of", lambda tag: made)
    assert release.release_tag("kv-cache-v0.2.0") == 1
    assert "'unreleased' where the date" in capsys.readouterr().out
    (tmp_path / "CHANGELOG.md").write_text(changelog.format(package.version, "2026-01-31"), encoding="utf-8")
    assert release.release_tag("kv-cache-v0.2.0") == 0
    assert built == [package.name]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_nothing_but_targets_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step for job in read_yaml(path)["jobs"].values() for step in job.get("steps", ())]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    for command in commands:
        words = command.split()
        assert words[0] == "make", command
        assert words[1] in targets, command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_every_job_ends(path: Path) -> None:
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 120


def test_all_versions_of_python_are_tested() -> None:
    matrix = read_yaml(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]


def test_the_lowest_versions_are_the_highest_of_the_lower_bounds() -> None:
    tool = load_tool("lowest_versions")
    lowest = tool.lowest_versions()
    found = list(tool.requirements())
    assert {requirement.name for requirement in found} == lowest.keys()
    assert all(requirement.specifier.contains(lowest[requirement.name]) for requirement in found)
    with pytest.raises(ValueError, match="no lower bound"):
        tool.lower_bound(Requirement("fastapi<1"))


def test_the_requirements_file_pins_each_third_party_project_once() -> None:
    tool = load_tool("lowest_versions")
    requirements = [Requirement(line) for line in tool.lines()]
    names = [requirement.name for requirement in requirements]
    assert len(names) == len(set(names))
    exact = {r.name for r in requirements if any(s.operator == "==" for s in r.specifier)}
    assert exact >= tool.lowest_versions().keys()
    assert len(list(tool.members())) == len(list(ROOT.glob("packages/*/pyproject.toml")))


def test_compose_mounts_files_that_exist_and_publishes_on_the_loopback_address_only() -> None:
    services = read_yaml(ROOT / "deploy/compose.yaml")["services"]
    assert services.keys() == {"llmstack", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / "deploy" / source).exists(), source
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "docs/grafana" / Path(home).name).is_file()


def test_prometheus_scrapes_the_server_and_grafana_asks_that_prometheus() -> None:
    config = read_yaml(ROOT / "deploy/prometheus.yaml")
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["llmstack:8000"]}]
    source = read_yaml(ROOT / "deploy/grafana/datasources.yaml")["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


def test_the_image_has_the_version_of_pytorch_that_the_suite_runs_with() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    tool = load_tool("lowest_versions")
    pinned = next(requirement for requirement in tool.developers_requirements() if requirement.name == "torch")
    assert f"torch{pinned.specifier}" in dockerfile
    assert 'ENTRYPOINT ["llmstack", "serve"' in dockerfile
    assert "USER llmstack" in dockerfile
