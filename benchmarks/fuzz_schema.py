"""Schemathesis, with all its phases and checks, against a server of the demo model: the document is right.

    python benchmarks/fuzz_schema.py --max-examples 100

`make fuzz` runs this. It needs the command `schemathesis`, which that target installs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from soak import serving


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=100, help="examples of each operation")
    options = parser.parse_args(arguments)
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or shutil.which("schemathesis")
    if command is None:
        print("fuzz_schema: the command schemathesis is not installed", file=sys.stderr)
        return 2
    with serving() as (server, address):
        done = subprocess.run(
            [
                command,
                f"--config-file={Path(__file__).with_name('schemathesis.toml')}",
                "run",
                f"http://{address}/openapi.json",
                "--phases=examples,coverage,fuzzing,stateful",
                "--checks=all",
                "--continue-on-failure",
                f"--max-examples={options.max_examples}",
                "--request-timeout=60",
            ],
            check=False,
        )
        if not server.is_running():
            print("fuzz_schema: the server has ended", file=sys.stderr)
            return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
