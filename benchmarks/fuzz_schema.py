"""Schemathesis, with all its phases and checks, against a server of the demo model: the document is right.

    python benchmarks/fuzz_schema.py --max-examples 100

`make fuzz` runs this, and `make test-full` a short run of it. It needs the command `schemathesis`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from soak import serving

# Every route that a flag turns on, with small limits where a route stores something.
SERVER_FLAGS = (
    "--enable-control-routes", "--enable-sleep-mode", "--enable-lora", "--enable-prompt-embeds",
    "--enable-tokenizer-info-endpoint", "--enable-server-load-tracking", "--open-metrics",
    "--max-file-bytes", "1000000",
)  # fmt: skip
# After these the server refuses with a 503 what needs the engine, and the check `not_a_server_error` takes every 5xx
# for a failure. So they have a run of their own, with the routes that a sleeping or paused server answers.
STOPPING_PATHS = ("/sleep", "/pause")
STATE_PATHS = (*STOPPING_PATHS, "/wake_up", "/resume", "/is_sleeping", "/is_paused")


def find_command() -> str | None:
    """The command of this environment, else the first one on the path."""
    return shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or shutil.which("schemathesis")


def run(command: str, max_examples: int, seed: int | None = None) -> int:
    """The exit status of the first run that finds something; 0 where none does."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("--state-dir", folder, *SERVER_FLAGS) as (server, address),
    ):
        for choice in (
            ["--phases=examples,coverage,fuzzing,stateful", *(f"--exclude-path={path}" for path in STOPPING_PATHS)],
            ["--phases=examples,coverage,fuzzing", *(f"--include-path={path}" for path in STATE_PATHS)],
        ):
            status = subprocess.run(
                [
                    command,
                    f"--config-file={Path(__file__).with_name('schemathesis.toml')}",
                    "run",
                    f"http://{address}/openapi.json",
                    "--checks=all",
                    "--continue-on-failure",
                    f"--max-examples={max_examples}",
                    "--request-timeout=60",
                    *([] if seed is None else [f"--seed={seed}"]),
                    *choice,
                ],
                env={**os.environ, "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("schemathesis_hooks.py"))},
                check=False,
            ).returncode
            if not server.is_running():
                print("fuzz_schema: the server has ended", file=sys.stderr)
                return 1
            if status:
                return status
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=100, help="examples of each operation")
    parser.add_argument("--seed", type=int, help="equal seeds send equal requests (default: a new one)")
    options = parser.parse_args(arguments)
    command = find_command()
    if command is None:
        print("fuzz_schema: the command schemathesis is not installed", file=sys.stderr)
        return 2
    return run(command, options.max_examples, options.seed)


if __name__ == "__main__":
    sys.exit(main())
