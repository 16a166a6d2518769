"""The backend of an operation is the best available one unless the environment forces another."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from llmstack_kernels import backends
from llmstack_kernels.dispatch import ENVIRONMENT_VARIABLE, choose, forced_variant, parse_choices
from llmstack_kernels.native import library, supported_variants
from llmstack_kernels.testing import native_variants


def test_every_operation_reports_what_runs_it() -> None:
    found = backends()
    assert {"linear", "paged_attention", "reshape_and_cache", "rms_norm", "layer_norm"} <= found.keys()
    assert all(name.partition(" ")[0] in {"native", "cpu", "composed", "reference"} for name in found.values())


def test_the_best_available_backend_is_chosen_and_the_reference_where_there_is_none() -> None:
    assert choose("paged_attention", "cpu", {}) == ("cpu" if library() is None else "native")
    assert choose("paged_attention", "cpu", {"paged_attention": "cpu"}) == "cpu"
    assert choose("paged_attention", "cpu", {"paged_attention": "reference"}) == "reference"
    assert choose("draw_tokens", "cuda", {}) == "reference"
    assert choose("paged_attention", "cuda", {"paged_attention": "cpu"}) == "reference"


def test_choices_name_one_operation_or_all() -> None:
    assert parse_choices("") == {}
    assert parse_choices("linear=reference, paged_attention=cpu") == {"linear": "reference", "paged_attention": "cpu"}
    assert set(parse_choices("reference").values()) == {"reference"}
    assert parse_choices("reference").keys() == backends().keys()


@pytest.mark.parametrize("text", ["matmul=reference", "linear=cuda", "fast", "linear=avx2"])
def test_unknown_operations_and_backends_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=ENVIRONMENT_VARIABLE):
        parse_choices(text)


def print_backends(choices: str) -> subprocess.CompletedProcess[str]:
    code = "import llmstack_kernels as k; print(*sorted(set(k.backends().values())), sep='\\n')"
    environment = os.environ | {ENVIRONMENT_VARIABLE: choices}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_environment_forces_the_reference() -> None:
    assert print_backends("reference").stdout.split() == ["reference"]


*OTHERS, PORTABLE = native_variants()


@pytest.mark.parametrize(
    "variant", [PORTABLE, *(pytest.param(*other.values, marks=[*other.marks, pytest.mark.full]) for other in OTHERS)]
)
def test_the_environment_forces_a_variant_beside_other_choices(variant: str) -> None:
    done = print_backends(f"{variant}, linear=reference")
    assert done.returncode == 0, done.stderr
    native = [line for line in done.stdout.splitlines() if line.startswith("native")]
    assert native
    assert {re.split("[(),;]", line)[1] for line in native} == {variant}
    assert "reference" in done.stdout.split()


def test_a_variant_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "avx2")
    assert forced_variant(["avx2", "portable"]) == "avx2"
    with pytest.raises(
        ValueError, match=r"'avx2' is not built or cannot run on this processor; available: portable\.$"
    ):
        forced_variant(["portable"])
    with pytest.raises(ValueError, match="available: none"):
        forced_variant([])
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "avx2,portable")
    with pytest.raises(ValueError, match="not avx2 and portable"):
        forced_variant(["avx2", "portable"])
    assert "neon" not in supported_variants() or "avx2" not in supported_variants()
    done = print_backends("neon" if "avx2" in supported_variants() else "avx2")
    assert done.returncode == 1
    assert "cannot run on this processor" in done.stderr
