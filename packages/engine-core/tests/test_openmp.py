import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from llmstack_engine_core.openmp import SHORT_SPINS, short_spins

LOADS_PYTORCH = """
from llmstack_engine_core.openmp import short_spins
with short_spins():
    import torch
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch brings GNU's OpenMP on Linux")
@pytest.mark.parametrize(("chosen", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_openmp_reads_the_count(chosen: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = inherited | chosen | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(
        [sys.executable, "-c", LOADS_PYTORCH], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


@pytest.mark.parametrize("chosen", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(chosen, "PASSIVE")
    before = dict(os.environ)
    with short_spins():
        assert dict(os.environ) == (before | SHORT_SPINS if chosen is None else before)
    assert dict(os.environ) == before
