"""Recurrences other than that of Mamba-2, as published: ranks, chunks, hits and adapters write transformers' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from published_states import ADAPTED, PUBLISHED, Published
from state_tokens import (
    check_adapter,
    check_captured_decodes,
    check_own_names,
    cuts,
    new_model,
    save_as_published,
    tokens_of,
    tokens_of_transformers,
)

from llmstack_kernels.testing import runs_native_kernels


@pytest.fixture(scope="module", params=[name if name == "OlmoHybrid" else pytest.param(name, marks=pytest.mark.full)
                                        for name in PUBLISHED])  # fmt: skip
def published(request: pytest.FixtureRequest) -> Published:
    return PUBLISHED[request.param]


@pytest.fixture(scope="module")
def checkpoint(published: Published, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """With a configuration of the hub, and its names of tensors, which transformers writes again."""
    folder, model = tmp_path_factory.mktemp("published"), new_model(published.architecture, published.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.1)  # zeros and ones would hide one that is not used
    save_as_published(model, folder, published.architecture, published.config)
    return folder, model


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    return tokens_of_transformers(checkpoint[1])


@pytest.mark.parametrize("options", cuts({"tensor_parallel_size": 2}), ids=str)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: tuple[Path, Any], expected: list[list[int]], published: Published, options: dict[str, Any]
) -> None:
    if "tensor_parallel_size" in options and published.has_experts:
        options = options | {"enable_expert_parallel": True}
    assert tokens_of(checkpoint[0], **options) == expected


def test_tensors_under_the_names_of_transformers_are_read(
    checkpoint: tuple[Path, Any], expected: list[list[int]], published: Published, tmp_path: Path
) -> None:
    """Experts and convolutions as one tensor each."""
    check_own_names(checkpoint, tmp_path, expected, are_others=published.has_other_names)


@pytest.mark.full
def test_an_adapter_writes_the_tokens_of_its_merged_weights(
    checkpoint: tuple[Path, Any], published: Published, tmp_path: Path
) -> None:
    if not published.has_names_of_adapters:
        pytest.skip("the hub has other names of layers")
    names = [name for name in ADAPTED if name not in published.renamed]
    check_adapter(checkpoint[0], tmp_path, names, published.adapter_spread)


@pytest.mark.skipif(not runs_native_kernels(), reason="only native steps are captured")
def test_captured_decodes_have_the_bits_of_eager_ones(
    checkpoint: tuple[Path, Any], published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not published.is_captured:
        pytest.skip("its steps are not captured")
    check_captured_decodes(checkpoint[0], monkeypatch)
