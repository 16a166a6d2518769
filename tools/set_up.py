"""Makes `.venv` ready: `serve` for what a server needs and no more, `develop` for the developers' environment.

    python3 tools/set_up.py serve      # the packages, PyTorch, the native kernels of this processor, a model that talks
    python3 tools/set_up.py develop    # all of that, the other kernels, hatch and its default environment

It needs Python and pip alone, and is quick where there is nothing to do. Kernels are compiled while packages are
fetched. A line says what is being done and for how many seconds; on a terminal that line is kept up to date.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
HATCH = ROOT / ".hatch" / "bin" / "hatch"
BUILD_NATIVE = ROOT / "packages" / "kernels" / "src" / "llmstack_kernels" / "build_native.py"
SERVER = "llmstack-server"
# What builds editable installations in the environment itself: an isolated one for each package takes a minute in all.
BUILD_TOOLS = ("hatchling>=1.27", "editables>=0.5")
TALKING_MODEL = "smollm2"
REPORT_EVERY_S = 15.0


class SetUpError(Exception):
    """A command failed; the text says which and has the end of its output."""


class Progress:
    """What is being done, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._doing: dict[str, str] = {}
        self._reported_s = 0.0
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        threading.Thread(target=self._repeat, daemon=True).start()

    def now(self, task: str, what: str | None) -> None:
        """Task `task` does `what`, or has ended (None)."""
        with self._lock:
            self._doing.pop(task, None)
            if what is not None:
                self._doing[task] = what
            self._show()

    def end(self) -> None:
        """Nothing more is shown."""
        self._is_ended.set()
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)

    def _repeat(self) -> None:
        while not self._is_ended.wait(1.0):
            with self._lock:
                if sys.stdout.isatty() or time.monotonic() - self._reported_s >= REPORT_EVERY_S:
                    self._show()

    def _show(self) -> None:
        if not self._doing:
            return
        self._reported_s = time.monotonic()
        line = f"set-up {self._reported_s - self._started:4.0f} s: {'; '.join(self._doing.values())}"
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


class Task(threading.Thread):
    """Steps that run beside others. `finish` raises what they raised."""

    def __init__(self, name: str, progress: Progress, steps: Sequence[Step]) -> None:
        super().__init__(name=name, daemon=True)
        self._progress, self._steps = progress, steps
        self._error: SetUpError | None = None
        self.start()

    def run(self) -> None:
        """One step after the other."""
        try:
            for step in self._steps:
                self._run(step)
        except SetUpError as error:
            self._error = error
        finally:
            self._progress.now(self.name, None)

    def _run(self, step: Step) -> None:
        self._progress.now(self.name, step.what)
        step.run(lambda line: self._progress.now(self.name, f"{step.what} ({line})"))

    def finish(self) -> None:
        """Waits for the end, and raises the error of a step, if any."""
        self.join()
        if self._error is not None:
            raise self._error


class Step:
    """One command. Lines of its output that begin with `prefix` are shown; one that `may_fail` only says so."""

    def __init__(
        self,
        what: str,
        *command: str | Path,
        prefix: str = "",
        may_fail: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.what = what
        self._command, self._prefix, self._may_fail = [str(part) for part in command], prefix, may_fail
        self._variables = variables or {}

    def run(self, show: Callable[[str], None]) -> None:
        """Runs it; `show` gets the lines that are shown. SetUpError if it fails."""
        lines: list[str] = []
        variables = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **self._variables}
        with subprocess.Popen(
            self._command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
        ) as process:
            for line in process.stdout or ():
                lines.append(line)
                if self._prefix and line.startswith(self._prefix):
                    show(line.removeprefix(self._prefix).strip())
        if process.returncode == 0:
            return
        end = "".join(lines[-30:]).strip()
        if not self._may_fail:
            raise SetUpError(f"{' '.join(self._command)} failed:\n{end}")
        print(f"\n{end}", flush=True)


def siblings() -> dict[str, dict[str, Any]]:
    """Project name to its table `project`, for each package of this repository."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob("packages/*/pyproject.toml")]
    return {table["project"]["name"]: table["project"] for table in tables}


def requirements_of(name: str, projects: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What `name` requires of others than this repository, through its siblings and the extras that they ask for."""
    waiting, seen = [name], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        project, extras = one.partition("[")[::2]
        required = list(projects[project]["dependencies"])
        for extra in filter(None, extras.rstrip("]").split(",")):
            required += projects[project]["optional-dependencies"][extra]
        for requirement in required:
            own = re.match(r"llmstack-[a-z-]+(\[[a-z,]+\])?", requirement)
            if own:
                waiting.append(own.group())
            else:
                yield requirement


def name_of(requirement: str) -> str:
    """The project's name, as the index writes it."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def serving_requirements() -> list[str]:
    """What a server needs, at the versions that the developers' environment pins."""
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = {name_of(pin): pin for pin in workspace["tool"]["hatch"]["envs"]["default"]["dependencies"]}
    required = dict.fromkeys(requirements_of(SERVER, siblings()))
    return list(dict.fromkeys(pin for one in required for pin in (one, pins.get(name_of(one))) if pin))


def pip(what: str, *arguments: str) -> Step:
    """An installation. What is imported is compiled to byte code then: to compile all of PyTorch takes 20 s."""
    return Step(what, PYTHON, "-m", "pip", "install", "--quiet", "--no-compile", *arguments)


def has_own_pip() -> bool:
    """Whether the pip of this Python installs into other environments (`--python`, new in 22.3)."""
    try:
        return int(version("pip").partition(".")[0]) >= 23
    except PackageNotFoundError:
        return False


def make_environment() -> None:
    """Makes `.venv`, unless it is there; with pip only where this Python cannot install one: that takes 1 s, not 4."""
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=not has_own_pip())


def pip_itself() -> Step:
    """The installation of pip: version 23 computes half a second for each page of an index."""
    own = (sys.executable, "-m", "pip", "--python", PYTHON) if has_own_pip() else (PYTHON, "-m", "pip")
    return Step("installing pip", *own, "install", "--quiet", "--no-compile", "--upgrade", "pip>=25")


def kernels(*which: str) -> Step:
    """Their compilation. Without a compiler slower code runs, and the server says so."""
    return Step(
        "compiling native kernels", sys.executable, BUILD_NATIVE, *which, prefix="native kernels:", may_fail=True
    )


def serving_steps() -> list[Step]:
    """What a server is installed by."""
    requirements = serving_requirements()
    torch = [one for one in requirements if name_of(one) == "torch"]
    return [
        pip_itself(),
        pip("installing PyTorch", *torch),
        pip("installing what a server needs", *requirements, *BUILD_TOOLS),
        Step("installing the packages", PYTHON, "tools/sync_members.py"),
    ]


def serve(progress: Progress) -> None:
    """An environment that serves."""
    fetch = Step(f"fetching the model {TALKING_MODEL}", PYTHON, "tools/fetch_model.py", TALKING_MODEL, may_fail=True)
    tasks = [
        Task("kernels", progress, [kernels("--best")]),
        Task("packages", progress, [*serving_steps(), fetch]),
    ]
    for task in tasks:
        task.finish()
    (ENVIRONMENT / ".serving").touch()


def develop(progress: Progress) -> None:
    """The developers' environment, which hatch completes."""
    hatch = Step("installing hatch", sys.executable, "-m", "venv", HATCH.parent.parent)
    hatch_itself = Step(
        "installing hatch", HATCH.parent / "python", "-m", "pip", "install", "--quiet", "--no-compile", "hatch>=1.18,<2"
    )
    # (Of pip's setting, 0 is what switches the isolation off.)
    variables = {"PIP_NO_BUILD_ISOLATION": "0", "LLMSTACK_BUILD_NATIVE": "no"}
    complete = Step("installing the developers' tools", HATCH, "run", "sync", variables=variables)
    tasks = [
        Task("kernels", progress, [kernels()]),
        Task("packages", progress, [*serving_steps(), *([] if HATCH.exists() else [hatch, hatch_itself]), complete]),
    ]
    for task in tasks:
        task.finish()
    (ENVIRONMENT / ".serving").touch()
    (ENVIRONMENT / ".synced").touch()


def main() -> int:
    commands = {"serve": serve, "develop": develop}
    if sys.argv[1:] not in [[name] for name in commands]:
        print(__doc__)
        return 2
    progress = Progress()
    progress.now("environment", "making .venv")
    try:
        make_environment()
        progress.now("environment", None)
        commands[sys.argv[1]](progress)
    except SetUpError as error:
        progress.end()
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    progress.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
