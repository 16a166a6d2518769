"""Where Triton is not installed, everything but its kernels is there, and what needs them says so."""

from __future__ import annotations

import subprocess
import sys

# An import of what `sys.modules` holds as None fails as if it were not installed.
BLOCKED = "import sys; sys.modules['triton'] = None; "


def run_without_triton(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=False)


def test_every_operation_has_an_implementation_on_a_gpu_too() -> None:
    code = "from llmstack_kernels import backends; print(backends('cpu')); print(set(backends('cuda').values()))"
    result = run_without_triton(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1] == "{'reference'}"


def test_compiling_ahead_of_time_is_refused_with_a_sentence() -> None:
    code = "import runpy; runpy.run_module('llmstack_kernels.ahead_of_time', run_name='__main__')"
    result = run_without_triton(code)
    assert result.returncode == 2
    assert result.stderr == "Triton is not installed (extra `triton`).\n"
