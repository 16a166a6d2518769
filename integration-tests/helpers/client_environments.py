"""Environments with other people's clients, and the page that says how their last run ended.

The environments are kept in pytest's cache, so only the first run installs. Where a package index cannot be reached the
test is skipped and says why. As a plugin with `--clients-page FILE`, this module writes a row per client into the page.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

CLIENTS = Path(__file__).parents[1] / "clients"
INSTALL_TIMEOUT_S = 900
RUN_TIMEOUT_S = 240
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
    "OMP_NUM_THREADS": "1",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
}

Fill = Callable[[Path, tuple[str, ...]], subprocess.CompletedProcess[str]]
Install = Callable[..., Path]


def run(
    command: list[object], cwd: Path, timeout_s: float = RUN_TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    private = {name: str(cwd / name.lower()) for name in ("HF_HOME", "DSPY_CACHEDIR", "LLM_USER_PATH")}
    private["PROMPTFOO_CONFIG_DIR"] = str(cwd / "promptfoo")
    words = [str(word) for word in command]
    environment = {**os.environ, **OFFLINE, **private, **variables}
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=environment)


def output_of(command: list[object], cwd: Path, **variables: str) -> str:
    """What the command writes; it has to end with 0."""
    ran = run(command, cwd, **variables)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def said_by(command: list[object], cwd: Path) -> Any:
    """The JSON in the last line that the command writes."""
    return json.loads(output_of(command, cwd).strip().splitlines()[-1])


@pytest.fixture
def install(request: pytest.FixtureRequest) -> Install:
    """Makes a folder with clients installed in it, by a function that fills a new one, or takes the one made before."""
    cache = request.config.cache
    assert cache is not None

    def prepare(fill: Fill, *names: str, client: str = "") -> Path:
        key = hashlib.sha256(repr((sys.version_info[:2], fill.__name__, names)).encode()).hexdigest()[:16]
        folder = Path(cache.mkdir("clients")) / key
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            ran = fill(folder, names)
            if ran.returncode != 0:
                reason = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
                pytest.skip(f"{', '.join(names)} cannot be installed here: {reason[:200]}")
            (folder / "complete").touch()
        request.node.user_properties.append(("client", installed(folder, client or names[0])))
        return folder

    return prepare


def with_pip(folder: Path, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A virtual environment with nothing else in it."""
    venv.create(folder, with_pip=True)
    return run([folder / "bin/python", "-m", "pip", "install", "--quiet", *names], folder, INSTALL_TIMEOUT_S)


def with_new_python(folder: Path, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The same by Python 3.12 or newer, for clients that need it."""
    if sys.version_info >= (3, 12):
        return with_pip(folder, names)
    for python in (f"python3.{minor}" for minor in range(15, 11, -1)):
        path = shutil.which(python)
        if path is not None and run([path, "-m", "venv", folder], folder, INSTALL_TIMEOUT_S).returncode == 0:
            return run([folder / "bin/python", "-m", "pip", "install", "--quiet", *names], folder, INSTALL_TIMEOUT_S)
    pytest.skip("needs Python 3.12 or newer, which is not installed")


def with_pip_and_ours(folder: Path, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A virtual environment that takes what it needs from the developers' one, so that PyTorch is not copied."""
    venv.create(folder, with_pip=True)
    (packages_of(folder) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return run([folder / "bin/python", "-m", "pip", "install", "--quiet", *names], folder, INSTALL_TIMEOUT_S)


def with_npm(folder: Path, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A folder with `node_modules`."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which is not installed")
    (folder / "package.json").write_text("{}")
    return run(["npm", "install", "--loglevel=error", "--no-audit", "--no-fund", *names], folder, INSTALL_TIMEOUT_S)


def packages_of(folder: Path) -> Path:
    """Where the packages of a virtual environment are."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def installed(folder: Path, requirement: str) -> tuple[str, str]:
    """Name and version of the package that a requirement names."""
    if (folder / "node_modules").is_dir():
        name = re.sub(r"(?<=.)@.*", "", requirement)
        return name, json.loads((folder / "node_modules" / name / "package.json").read_text())["version"]
    name = re.split(r"[\[<>=]", requirement)[0]
    plain = re.sub(r"[-_.]+", "-", name).lower()
    for found in distributions(path=[str(one) for one in folder.glob("lib/python3*/site-packages")]):
        if re.sub(r"[-_.]+", "-", found.name).lower() == plain:
            return name, found.version
    raise AssertionError(f"{name} is not installed in its environment")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients-page", type=Path, help="the page that gets a row for each client that was tried")


class Page:
    """The table of clients in a page; rows of clients that were not tried stay."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        client = dict(report.user_properties).get("client")
        if client is None or (report.when != "call" and report.passed):
            return
        test = report.nodeid.split("::")[-1].removeprefix("test_").replace("_", " ")
        row = f"| {client[0]} | {client[1]} | {test} | {report.outcome}, {datetime.date.today()} |"
        head, table, rows, rest = self._parts()
        rows = [kept for kept in rows if kept.split(" | ")[2] != test]
        self.path.write_text("\n".join([*head, *table, *sorted([*rows, row]), *rest]) + "\n")

    def _parts(self) -> tuple[list[str], list[str], list[str], list[str]]:
        """What is before the table, its two first lines, its rows, and what follows."""
        lines = self.path.read_text().splitlines()
        start = next(index for index, line in enumerate(lines) if line.startswith("| Client |"))
        end = next((index for index in range(start, len(lines)) if not lines[index].startswith("|")), len(lines))
        return lines[:start], lines[start : start + 2], lines[start + 2 : end], lines[end:]


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--clients-page")
    if path is not None:
        config.pluginmanager.register(Page(path))
