"""Writes docs/start-problems.md from starts that fail; with --check, says whether it is current.

Each sentence of the page is what the code said just now: this tool provokes it. So a sentence that changes changes the
page, and one that is no longer said stops this tool.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from generated_page import write_page

from llmstack_command.errors import CommandLineError
from llmstack_command.main import choose, main
from llmstack_demo_model import model_path
from llmstack_kernels import native
from llmstack_model_files import ModelFilesError, resolve_model
from llmstack_model_files.resolve import _why_not
from llmstack_model_runner.preflight import find_problems
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.sockets import _bind_message
from llmstack_server.serving.state_directory import deployment_secret
from llmstack_types import ModelRunnerConfig

HEAD = """# When it does not start

`llmstack serve` refuses in one line what it cannot do, most often before anything is loaded. This page has these lines,
and what to do about each. Search it for a few words of yours.

Begin with two commands that start nothing. Both take the model and the port of your start:

```
llmstack doctor gpt2 --port 8000      # the machine: processor, memory, GPU, kernels, port, hub; each with its remedy
llmstack serve --dry-run gpt2         # every option with its source, and what is wrong with it
```

The exit code is 2 for a wrong command line or model, and 1 for anything else. While a server starts, `/health` answers
503 with its state. `tools/make_start_page.py` writes this page from starts that fail.
"""

Say = Callable[[Path], str]


@dataclass(frozen=True)
class Case:
    """A start that fails: how to make it say so, and what to do."""

    say: Say
    advice: str


def serve(*words: str) -> Say:
    """What `llmstack serve` says of a dry run with these words; `{}` stands for the folder of made models."""

    def say(folder: Path) -> str:
        line = ["serve", "--dry-run", *(word.format(folder) for word in words)]
        output = io.StringIO()
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            main(line)
        marks = ("llmstack serve: error: ", "llmstack serve: warning: NO")
        lines = [text for text in output.getvalue().splitlines() if text.startswith(marks)]
        if len(lines) != 1:
            raise AssertionError(f"{line} says {lines}")
        return lines[0].removeprefix(marks[0]).removeprefix("llmstack serve: warning: ")

    return say


def find(name: str) -> Say:
    """What the search for a model says."""

    def say(folder: Path) -> str:
        try:
            resolve_model(name.format(folder))
        except ModelFilesError as error:
            return str(error)
        raise AssertionError(f"{name} is found")

    return say


def too_large(folder: Path) -> str:
    """What the runner says of a cache that does not fit into a machine of 8 GiB."""
    (folder / "proc").mkdir()
    (folder / "proc" / "meminfo").write_text("MemTotal: 8388608 kB\n", encoding="utf-8")
    (sentence,) = find_problems(ModelRunnerConfig(str(model_path())), kv_cache_bytes=900 << 30, root=folder)
    return sentence


def stale_kernels(folder: Path) -> str:
    """What a start says of a library that was compiled from other sources."""
    answers: dict[str, Any] = {
        "library_path": lambda variant: folder / "notes.txt",
        "is_built": lambda variant: False,
        "is_stale": lambda variant: True,
    }
    with mock.patch.multiple(native, **answers), mock.patch.dict(os.environ):
        os.environ.pop("LLMSTACK_KERNELS", None)
        try:
            native.library.__wrapped__()  # without its cache
        except native.StaleLibraryError as error:
            return str(error)
    raise AssertionError("the library is accepted")


def state_folder(folder: Path, *, in_use: bool) -> str:
    """What a start says of a folder that is open to others, or that a server has."""
    path = folder / "state"
    path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if in_use:
            stack.enter_context(deployment_secret(str(path)))
        else:
            path.chmod(0o755)
        try:
            stack.enter_context(deployment_secret(str(path)))
        except ServeError as error:
            return str(error)
    raise AssertionError("the folder is accepted")


def command_alone(folder: Path) -> str:
    """What the command says where no package serves."""
    try:
        choose({}, "serve")
    except CommandLineError as error:
        return str(error)
    raise AssertionError("there is a command")


def bind(number: int, host: str, port: int) -> Say:
    """What a start says of an address that the system refuses."""
    return lambda folder: _bind_message(OSError(number, os.strerror(number)), host, port)


def hub(error: Exception) -> Say:
    """What the search for a model says when the hub fails so."""
    return lambda folder: _why_not("org/model", None, error)


def gated(folder: Path) -> str:
    from huggingface_hub.errors import GatedRepoError

    return _why_not("org/model", None, GatedRepoError.__new__(GatedRepoError))


def missing(folder: Path) -> str:
    from huggingface_hub.errors import RepositoryNotFoundError

    return _why_not("org/model", None, RepositoryNotFoundError.__new__(RepositoryNotFoundError))


SECTIONS: dict[str, list[Case]] = {
    "The command and its options": [
        Case(
            command_alone,
            "Only the command is installed. Install the server as [the first page](index.md#install) says.",
        ),
        Case(
            serve("--prot", "9000", "--load-format", "dummy"),
            "The flag does not exist. The nearest one is named; `llmstack serve --help` has the groups of all.",
        ),
        Case(serve("--port", "99999"), "The value is out of range. The line names what is allowed."),
        Case(serve("--quantization", "int9"), "The value is not one of the choices. The nearest one is named."),
        Case(
            serve(str(model_path()), "--max-model-len", "4096"),
            "The model cannot handle longer texts than it was trained for. Leave the flag out, or lower it.",
        ),
        Case(serve("--require-auth"), "Give a key, best by the environment variable `LLMSTACK_API_KEY` or in a file."),
        Case(
            serve("--host", "192.168.0.7"),
            "A warning, not an error: the server starts. Set a key before others can reach it.",
        ),
    ],
    "Address and port": [
        Case(
            bind(errno.EADDRINUSE, "127.0.0.1", 8000),
            "Another program listens there, often an earlier server. End it, or choose another port.",
        ),
        Case(
            bind(errno.EACCES, "127.0.0.1", 80),
            "Ports below 1024 belong to the administrator. Choose another one, and put a proxy in front.",
        ),
        Case(
            bind(errno.EADDRNOTAVAIL, "192.0.2.1", 8000),
            "Listen on `127.0.0.1`, or on `0.0.0.0` for all addresses of this machine.",
        ),
    ],
    "The model": [
        Case(find("{}/nowhere"), "The path is wrong, or not mounted in this container."),
        Case(
            find("{}/empty"), "The folder has no model. Name the one with `config.json`, often a folder of `snapshots`."
        ),
        Case(find("{}/notes.txt"), "Name the folder of the model, or its GGUF file."),
        Case(
            serve("{}/weightless"),
            "The weights are not there: the download was cut off, or they were left out of the copy.",
        ),
        Case(
            serve("{}/pickled"),
            "Opening such a file can run code, so it is never done. Most repositories have a copy in safetensors.",
        ),
        Case(
            serve("{}/other"),
            "[Supported models](models.md) has the architectures, and what runs through transformers.",
        ),
        Case(find("gpt-2"), "A known misspelling. The right name is in the line."),
        Case(find("https://example.com/org/model"), "Give the repository's id, without the address."),
    ],
    "The hub": [
        Case(
            hub(ConnectionError()),
            "There is no network, or a proxy is needed (`HTTPS_PROXY`). Folders and installed models need none of it.",
        ),
        Case(missing, "The name is misspelt, or the repository is private."),
        Case(gated, "Its owner asks for consent. Give it on the page of the model, then set `HF_TOKEN`."),
    ],
    "Native kernels": [
        Case(
            stale_kernels,
            "The C++ of the clone is newer than what was compiled from it. Any `make` command compiles it again.",
        ),
    ],
    "Memory and state": [
        Case(
            too_large,
            "The model does not fit. The limit is that of the machine, or of the container where it is lower.",
        ),
        Case(
            lambda folder: state_folder(folder, in_use=True),
            "One server has a state folder at a time. Give the second one a folder of its own.",
        ),
        Case(
            lambda folder: state_folder(folder, in_use=False),
            "Run `chmod 700` on the folder: it holds a secret and the texts of stored responses.",
        ),
    ],
}


def make_models(folder: Path) -> None:
    """Folders that are no models, or not whole ones."""
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("no model\n", encoding="utf-8")
    for name in ("weightless", "pickled"):
        (folder / name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(Path(model_path()) / file, folder / name)
    shutil.copytree(model_path(), folder / "other")
    config = json.loads((folder / "other" / "config.json").read_text(encoding="utf-8"))
    changed = json.dumps(config | {"architectures": ["OtherForCausalLM"]})
    (folder / "other" / "config.json").write_text(changed, encoding="utf-8")
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"")


def page() -> str:
    """The whole page."""
    logging.disable(logging.WARNING)  # what is logged beside the sentences
    parts = [HEAD]
    for title, cases in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| it says | what to do |\n|---|---|\n")
        for case in cases:
            # One folder each: its path is the one thing of a sentence that differs from run to run.
            with tempfile.TemporaryDirectory() as name:
                make_models(Path(name))
                sentence = case.say(Path(name)).replace(name, "/models").replace("|", "\\|")
            parts.append(f"| `{sentence}` | {case.advice} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(write_page("start-problems.md", page()))
