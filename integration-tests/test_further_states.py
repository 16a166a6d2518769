"""Recurrences other than that of Mamba-2, as published: ranks, chunks, hits and adapters write transformers' tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published_states import ADAPTED, PUBLISHED, Published
from safetensors.torch import load_file, save_file
from state_tokens import check_adapter, check_captured_decodes, tokens_of, tokens_of_transformers

from llmstack_kernels.testing import runs_native_kernels


@pytest.fixture(scope="module", params=[name if name == "OlmoHybrid" else pytest.param(name, marks=pytest.mark.full)
                                        for name in PUBLISHED])  # fmt: skip
def published(request: pytest.FixtureRequest) -> Published:
    return PUBLISHED[request.param]


@pytest.fixture(scope="module")
def checkpoint(published: Published, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """With a configuration of the hub, and its names of tensors, which transformers writes again."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(3)
    model_class = getattr(transformers, published.architecture)
    model = model_class(model_class.config_class(**published.config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.1)  # zeros and ones would hide one that is not used
    model.save_pretrained(folder)
    config = published.config | {"architectures": [published.architecture], "transformers_version": "4.57.0"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    return tokens_of_transformers(checkpoint[1])


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 23},
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 7}, marks=pytest.mark.full),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: tuple[Path, Any], expected: list[list[int]], published: Published, options: dict[str, Any]
) -> None:
    if "tensor_parallel_size" in options and published.has_experts:
        options = options | {"enable_expert_parallel": True}
    assert tokens_of(checkpoint[0], **options) == expected


def test_tensors_under_the_names_of_transformers_are_read(
    checkpoint: tuple[Path, Any], expected: list[list[int]], published: Published, tmp_path: Path
) -> None:
    """Those of its modules: experts and convolutions as one tensor each."""
    (tmp_path / "config.json").write_text((checkpoint[0] / "config.json").read_text())
    own = {name: tensor.clone() for name, tensor in checkpoint[1].state_dict().items()}
    changed = own.keys() ^ load_file(checkpoint[0] / "model.safetensors").keys()
    assert bool(changed) == published.has_other_names
    save_file(own, tmp_path / "model.safetensors")
    assert tokens_of(tmp_path, max_num_batched_tokens=23) == expected


@pytest.mark.full
def test_an_adapter_writes_the_tokens_of_its_merged_weights(
    checkpoint: tuple[Path, Any], published: Published, tmp_path: Path
) -> None:
    if not published.has_names_of_adapters:
        pytest.skip("the hub has other names of layers")
    check_adapter(checkpoint[0], tmp_path, ADAPTED)


@pytest.mark.skipif(not runs_native_kernels(), reason="only native steps are captured")
def test_captured_decodes_have_the_bits_of_eager_ones(
    checkpoint: tuple[Path, Any], published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not published.is_captured:
        pytest.skip("its steps are not captured")
    check_captured_decodes(checkpoint[0], monkeypatch)
