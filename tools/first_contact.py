"""A stranger's first minutes: clones this repository, runs `make serve`, and times the first token of a chat.

    python tools/first_contact.py           a fresh clone in an empty folder, and then a second `make serve`
    python tools/first_contact.py --test    also the set-up of `make test`, and `make test` itself

The clone has the last commit. Its environment is empty: a home of its own, no cache of pip and no virtual environment.
Of this environment it gets the search path, the language, and what pip and downloads need. Processor seconds are those
of all processes that a stage has started, ended ones included.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
PASSED_PREFIXES = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
PROMPT = "What is the capital of France?"
SERVE_LIMIT_S = 1800.0
TEST_LIMIT_S = 3600.0
STOP_LIMIT_S = 30.0
POLL_S = 0.02
PROBE_PATH = "/health"
PROBE = f'"GET {PROBE_PATH} HTTP/'
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Aim:
    """What a stage may take; None where there is no limit."""

    wall_s: float | None = None
    processor_s: float | None = None


FIRST = Aim(90, 100)
SECOND = Aim(2)
SET_UP = Aim(240)
TEST = Aim(600)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one stage took, and what it says of itself."""

    name: str
    wall_s: float
    processor_s: float
    aim: Aim
    note: str = ""

    def __str__(self) -> str:
        wall = _beside(self.wall_s, self.aim.wall_s, "s")
        processor = _beside(self.processor_s, self.aim.processor_s, "s of processor time")
        return f"{self.name}: {wall}, {processor}{f'; {self.note}' if self.note else ''}"


class StageError(Exception):
    """A stage did not do what it is for; the text says which, and why."""


class Stage:
    """A command in the clone, whose output is shown with the seconds since its start."""

    def __init__(self, words: list[str], folder: Path, variables: Mapping[str, str]) -> None:
        self._spent_before_s = _spent_s()
        self.started_s = time.monotonic()
        self.command = " ".join(words)
        print(f"\n$ {self.command}", flush=True)
        self.process = subprocess.Popen(
            words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_s

    def processor_s(self) -> float:
        """Processor seconds of all that was started since then: of those that ended, and of those that run."""
        self._reap()
        return _spent_s() - self._spent_before_s

    def wait(self, limit_s: float) -> int:
        """The exit code.

        Raises:
            StageError: It takes longer than `limit_s`.
        """
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise StageError(f"{self.command} took longer than {limit_s:g} s") from None

    def end(self) -> None:
        """Ends it as Ctrl-C does, then whatever is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT_S)
        while left := descendants(os.getpid()):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            self._reap()
            time.sleep(POLL_S)
        self._reader.join(STOP_LIMIT_S)

    def _reap(self) -> None:
        """Waits for orphans that ended; the stage's own process is left to `subprocess`."""
        for pid in descendants(os.getpid()):
            if pid != self.process.pid:
                with suppress(ChildProcessError):  # another process's child
                    os.waitpid(pid, os.WNOHANG)

    def _show(self) -> None:
        for line in self.process.stdout or ():
            if PROBE in line:
                continue  # the server's access log has one for each question whether it is ready
            print(f"[{self.wall_s():7.2f} s] {line.rstrip()}", flush=True)


@contextmanager
def running(words: list[str], folder: Path, variables: Mapping[str, str]) -> Iterator[Stage]:
    """A stage that has ended with the `with` statement."""
    stage = Stage(words, folder, variables)
    try:
        yield stage
    finally:
        stage.end()


def serve(name: str, folder: Path, variables: Mapping[str, str], aim: Aim) -> Measured:
    """Starts `make serve` and times the first token of a streamed chat.

    Raises:
        StageError: The command ended before, or took too long.
    """
    port = _free_port()
    with running(["make", "serve", f"ARGS=--port {port}"], folder, variables) as stage:
        while not _is_ready(port):
            if stage.process.poll() is not None:
                raise StageError(f"{stage.command} ended with exit code {stage.process.returncode} before it served")
            if stage.wall_s() > SERVE_LIMIT_S:
                raise StageError(f"{stage.command} did not serve within {SERVE_LIMIT_S:g} s")
            time.sleep(POLL_S)
        token = _first_token(port)
        measured = Measured(name, stage.wall_s(), stage.processor_s(), aim, f"the first token is {token!r}")
    return measured


def command(name: str, words: list[str], folder: Path, variables: Mapping[str, str], aim: Aim) -> Measured:
    """Runs a command to its end.

    Raises:
        StageError: It failed, or took too long.
    """
    with running(words, folder, variables) as stage:
        exit_code = stage.wait(TEST_LIMIT_S)
        measured = Measured(name, stage.wall_s(), stage.processor_s(), aim)
    if exit_code:
        raise StageError(f"{stage.command} ended with exit code {exit_code}")
    return measured


def measure(repository: Path, workspace: Path, revision: str, *, with_tests: bool) -> Iterator[Measured]:
    """All stages in an empty folder; each is yielded when it has ended."""
    clone, home = workspace / "llmstack", workspace / "home"
    home.mkdir()
    variables = environment(os.environ, home)
    with running(["git", "clone", "--quiet", f"file://{repository}", str(clone)], workspace, variables) as stage:
        if stage.wait(SERVE_LIMIT_S):
            raise StageError("the repository could not be cloned")
    subprocess.run(["git", "checkout", "--quiet", "--detach", revision], cwd=clone, check=True)
    yield serve("first token", clone, variables, FIRST)
    yield serve("first token of a second `make serve`", clone, variables, SECOND)
    if with_tests:
        yield command("set-up of `make test`", ["make", "setup"], clone, variables, SET_UP)
        yield command("`make test`", ["make", "test"], clone, variables, TEST)


def environment(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """The variables of a stranger's shell."""
    passed = {key: value for key, value in variables.items() if key in PASSED_ON or key.startswith(PASSED_PREFIXES)}
    folders = passed.get("PATH", os.defpath).split(os.pathsep)
    own = [folder for folder in folders if not (Path(folder).parent / "pyvenv.cfg").is_file()]
    return passed | {"PATH": os.pathsep.join(own), "HOME": str(home)}


def descendants(pid: int) -> list[int]:
    """All processes below one; orphans are below this one, which is their subreaper."""
    found: list[int] = []
    pending = [pid]
    while pending:
        for task in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(word) for word in task.read_text().split()]
                found += children
                pending += children
    return found


def _process_s(pid: int) -> float:
    """Processor seconds of a process, and of its children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile, and is counted with its parent's
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def _spent_s() -> float:
    """Processor seconds of all that this process has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + sum(map(_process_s, descendants(os.getpid())))


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", PROBE_PATH)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _first_token(port: int) -> str:
    """The first piece of text of a streamed chat."""
    body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 16})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise StageError(f"the chat was refused with {answer.status}: {answer.read(500)!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                text = choices[0].get("delta", {}).get("content")
                if text:
                    return str(text)
    except (OSError, http.client.HTTPException) as error:
        raise StageError(f"the chat was cut off: {error}") from error
    finally:
        connection.close()
    raise StageError("the chat ended without a token")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _beside(value: float, aim: float | None, unit: str) -> str:
    if aim is None:
        return f"{value:.1f} {unit}"
    return f"{value:.1f} {unit} ({'within' if value <= aim else 'over'} the aim of {aim:g})"


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a stranger's first minutes with this repository.")
    parser.add_argument("--test", action="store_true", help="also set up and run `make test`")
    parser.add_argument("--repository", type=Path, default=ROOT, help="what is cloned (default: this repository)")
    parser.add_argument("--revision", default="HEAD", help="the commit (default: HEAD)")
    parser.add_argument("--keep", action="store_true", help="keep the clone, and say where it is")
    options = parser.parse_args()
    git = ["git", "-C", str(options.repository), "rev-parse", f"{options.revision}^{{commit}}"]
    revision = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    workspace = Path(tempfile.mkdtemp(prefix="first-contact-"))
    measured: list[Measured] = []
    try:
        for one in measure(options.repository.resolve(), workspace, revision, with_tests=options.test):
            measured.append(one)  # noqa: PERF402 - what was measured before a stage fails is printed
    except StageError as error:
        print(f"\nfirst contact: {error}")
        return 1
    finally:
        print(f"\ncommit {revision[:8]}", *measured, sep="\n", flush=True)
        if options.keep:
            print(f"the clone is in {workspace}")
        else:
            shutil.rmtree(workspace, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
