"""The backend of an operation is the best available one unless the environment forces another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llmstack_kernels import backends
from llmstack_kernels.dispatch import ENVIRONMENT_VARIABLE, choose, parse_choices
from llmstack_kernels.native import library


def test_every_operation_reports_what_runs_it() -> None:
    found = backends()
    assert {"linear", "paged_attention", "reshape_and_cache", "rms_norm", "layer_norm"} <= found.keys()
    assert all(name.partition(" ")[0] in {"native", "cpu", "composed", "reference"} for name in found.values())


def test_the_best_available_backend_is_chosen_and_the_reference_where_there_is_none() -> None:
    assert choose("paged_attention", "cpu", {}) == ("cpu" if library() is None else "native")
    assert choose("paged_attention", "cpu", {"paged_attention": "cpu"}) == "cpu"
    assert choose("paged_attention", "cpu", {"paged_attention": "reference"}) == "reference"
    assert choose("bidirectional_attention", "cuda", {}) == "reference"
    assert choose("paged_attention", "cuda", {"paged_attention": "cpu"}) == "reference"


def test_choices_name_one_operation_or_all() -> None:
    assert parse_choices("") == {}
    assert parse_choices("linear=reference, paged_attention=cpu") == {"linear": "reference", "paged_attention": "cpu"}
    assert set(parse_choices("reference").values()) == {"reference"}
    assert parse_choices("reference").keys() == backends().keys()


@pytest.mark.parametrize("text", ["matmul=reference", "linear=cuda", "fast"])
def test_unknown_operations_and_backends_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=ENVIRONMENT_VARIABLE):
        parse_choices(text)


def test_the_environment_forces_the_reference() -> None:
    code = "import llmstack_kernels as k; print(sorted(set(k.backends().values())))"
    environment = os.environ | {ENVIRONMENT_VARIABLE: "reference"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['reference']"
