"""Each package's wheel in a fresh environment that holds its declared requirements and nothing else.

Wheels are built from the tree; siblings come from those wheels. Third-party requirements are links to distributions of
the developers' environment, exactly those in the closure of the declared requirements: so no index is asked, torch is
not copied, and an undeclared import fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))
TIMEOUT_S = 90

# The first test also builds the wheels, and with them native kernels whose sources have changed: half a minute of
# processor time, on a machine that may be busy.
pytestmark = pytest.mark.timeout(400)

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys

missing = {}
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps(missing))
"""


@dataclass(frozen=True, slots=True)
class Wheel:
    path: Path
    metadata: Message

    @property
    def name(self) -> str:
        return canonicalize_name(self.metadata["Name"])

    @property
    def file_prefix(self) -> str:
        return self.path.name.split("-", 1)[0]

    @property
    def import_name(self) -> str:
        with zipfile.ZipFile(self.path) as archive:
            return next(name.split("/")[0] for name in archive.namelist() if ".dist-info" not in name)

    @property
    def readme(self) -> str:
        return str(self.metadata.get_payload())

    def requirements(self, extras: frozenset[str]) -> list[Requirement]:
        return applicable(self.metadata.get_all("Requires-Dist", []), extras)


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with one wheel and its closure of requirements."""

    folder: Path
    wheel: Wheel

    def run(self, *arguments: str) -> str:
        """The standard output of the environment's python, isolated from the caller's variables and user site."""
        command = [str(self.folder / "bin/python"), "-I", *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, f"{self.wheel.name} alone:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def applicable(requires: list[str], extras: frozenset[str]) -> list[Requirement]:
    """The requirements whose markers hold here, for the distribution itself or for one of its `extras`."""
    requirements = [Requirement(text) for text in requires]
    contexts = [{"extra": extra} for extra in ("", *extras)]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate(context) for context in contexts)]


def build(folder: Path, into: Path) -> Wheel:
    path = Path(next(WheelBuilder(str(folder)).build(directory=str(into), versions=["standard"])))
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Wheel(path, HeaderParser().parsestr(archive.read(member).decode()))


def third_party(requirement: Requirement) -> metadata.Distribution:
    """The installed distribution that meets `requirement`; fails where the developers' environment lacks it."""
    try:
        found = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        pytest.fail(f"{requirement} is declared, but is not in the developers' environment")
    assert requirement.specifier.contains(found.version, prereleases=True), f"{requirement}: {found.version} is here"
    return found


def closure(wheel: Wheel, siblings: dict[str, Wheel]) -> Iterator[Wheel | metadata.Distribution]:
    """`wheel` and everything it requires, each once; siblings as wheels, the rest as installed distributions."""
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [Requirement(wheel.name)]
    while pending:
        requirement = pending.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        sibling = siblings.get(key[0])
        if sibling is not None:
            assert requirement.specifier.contains(sibling.metadata["Version"]), (
                f"{requirement}: no such wheel was built"
            )
            pending += sibling.requirements(key[1])
            yield sibling
        else:
            installed = third_party(requirement)
            pending += applicable(installed.requires or [], key[1])
            yield installed


def unpack(wheel: Wheel, site_packages: Path) -> None:
    with zipfile.ZipFile(wheel.path) as archive:
        archive.extractall(site_packages)


def link(distribution: metadata.Distribution, site_packages: Path) -> None:
    """Makes the top-level files and folders of an installed distribution importable, without copying them."""
    tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    for top in tops:
        target = site_packages / top
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(top))))


def write_scripts(wheel: Wheel, folder: Path) -> None:
    """The commands that an installer would make from the wheel's entry points."""
    points = ConfigParser()
    with zipfile.ZipFile(wheel.path) as archive:
        for member in archive.namelist():
            if member.endswith(".dist-info/entry_points.txt"):
                points.read_string(archive.read(member).decode())
    for name, value in points["console_scripts"].items() if points.has_section("console_scripts") else ():
        module, function = value.split(":")
        script = folder / "bin" / name
        script.write_text(
            f"#!{folder}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Every package's wheel by its folder, built once."""
    into = tmp_path_factory.mktemp("wheels")
    return {package: build(ROOT / "packages" / package, into) for package in PACKAGES}


def empty_environment(folder: Path) -> Path:
    """Makes a virtual environment without anything, not even pip; its folder of packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def environment_of(wheel: Wheel, wheels: dict[str, Wheel], folder: Path) -> Environment:
    """A fresh environment in `folder` with `wheel` and its closure."""
    site_packages = empty_environment(folder)
    for part in closure(wheel, {sibling.name: sibling for sibling in wheels.values()}):
        if isinstance(part, Wheel):
            unpack(part, site_packages)
            write_scripts(part, folder)
        else:
            link(part, site_packages)
    return Environment(folder, wheel)


@pytest.fixture(scope="session", params=PACKAGES)
def alone(
    request: pytest.FixtureRequest, wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """A fresh environment with the wheel of one package."""
    return environment_of(wheels[request.param], wheels, tmp_path_factory.mktemp("environment"))


def test_what_changes_kernels_stays_out_of_the_wheel(wheels: dict[str, Wheel]) -> None:
    with zipfile.ZipFile(wheels["kernels"].path) as archive:
        folders = {name.split("/")[1] for name in archive.namelist()}
    assert "linear" in folders
    assert "ahead_of_time" not in folders


def test_its_wheel_carries_its_types_and_nothing_but_its_package(alone: Environment) -> None:
    with zipfile.ZipFile(alone.wheel.path) as archive:
        names = archive.namelist()
    assert f"{alone.wheel.import_name}/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {alone.wheel.import_name, alone.wheel.file_prefix}
    assert alone.wheel.metadata["License-Expression"] == "Apache-2.0"


def test_it_runs_its_readme_example_with_only_what_it_declares(alone: Environment) -> None:
    block = re.search(r"^```python\n(.*?)^```", alone.wheel.readme, re.MULTILINE | re.DOTALL)
    assert block is not None
    example = alone.folder / "readme_example.py"
    example.write_text(block[1], encoding="utf-8")
    alone.run(str(example))


def test_every_module_imports_with_only_what_it_declares(alone: Environment) -> None:
    missing = json.loads(alone.run("-c", IMPORT_EVERYTHING, alone.wheel.import_name).splitlines()[-1])
    every_extra = frozenset(alone.wheel.metadata.get_all("Provides-Extra", []))
    # `opentelemetry-api` and its like are one namespace package.
    optional = {requirement.name.split("-")[0] for requirement in alone.wheel.requirements(every_extra)}
    assert {module: name for module, name in missing.items() if name.split(".")[0] not in optional} == {}


def test_what_is_not_declared_is_not_importable(alone: Environment) -> None:
    code = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    assert alone.run("-c", code, "pytest", "transformers", "openai", "hatchling") == "[]\n"


def test_the_server_installs_the_command_with_its_subcommands(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    environment = environment_of(wheels["api-server"], wheels, tmp_path)
    overview = environment.run(str(tmp_path / "bin/llmstack"), "--help")
    assert [name for name in ("bench", "replay", "serve", "simulate") if f"\n  {name} " not in overview] == []


def test_pip_installs_the_server_from_a_folder_of_wheels_and_it_answers(
    wheels: dict[str, Wheel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the README says of the folder that `make wheels` makes; other people's packages are there already."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server = wheels["api-server"]
    site_packages = empty_environment(tmp_path / "environment")
    for part in closure(server, {sibling.name: sibling for sibling in wheels.values()}):
        if not isinstance(part, Wheel):
            link(part, site_packages)
    environment = Environment(tmp_path / "environment", server)
    command = environment.folder / "bin/llmstack"
    pip = [sys.executable, "-m", "pip", "--python", str(environment.folder / "bin/python"), "--isolated"]
    words = ["install", "--quiet", "--no-index", "--find-links", str(server.path.parent), "llmstack-server"]
    done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "`llmstack serve` can start." in environment.run(str(command), "doctor", "--port", "0")
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    requests.write_text(json.dumps(request) + "\n", encoding="utf-8")
    environment.run(str(command), "run-batch", "-i", str(requests), "-o", str(answers))
    answer = json.loads(answers.read_text(encoding="utf-8"))
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 5
