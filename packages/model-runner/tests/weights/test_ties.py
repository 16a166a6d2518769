"""A head that the configuration ties is read where its values are others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmstack_model_runner.weights import ties

TABLE = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (TABLE, True),
        (TABLE + 1, False),
        (TABLE.bfloat16(), False),
        (torch.cat((TABLE, TABLE)), False),
        (None, True),
    ],
    ids=["equal", "other values", "another type", "another shape", "none"],
)
def test_a_tie_holds_unless_the_weights_have_another_head(
    head: torch.Tensor | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ties, "_ROWS_AT_ONCE", 2)
    tensors = {"model.embed_tokens.weight": TABLE} | ({} if head is None else {"lm_head.weight": head.clone()})
    save_file(tensors, tmp_path / "model.safetensors")
    assert ties.untied_if_different({"tie_word_embeddings": True}, tmp_path) == {"tie_word_embeddings": expected}
    assert ties.untied_if_different({"tie_word_embeddings": False}, tmp_path) == {"tie_word_embeddings": False}


def test_no_header_without_a_head_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    check = ties.check_safetensors
    monkeypatch.setattr(ties, "check_safetensors", lambda path: decoded.append(path.name) or check(path))

    def save(**name_to_tensor: torch.Tensor) -> None:
        names = [name.replace("__", ".") for name in name_to_tensor]
        index = {"weight_map": {name: f"{name}.safetensors" for name in names}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, tensor in zip(names, name_to_tensor.values(), strict=True):
            save_file({name: tensor}, tmp_path / f"{name}.safetensors")

    without_head = {"model__layers__0__weight": TABLE, "model__embed_tokens__weight": TABLE}
    save(**without_head)
    assert ties.untied_if_different({}, tmp_path) == {}
    assert decoded == []
    save(**without_head, lm_head__weight=TABLE + 1)
    assert ties.untied_if_different({}, tmp_path) == {"tie_word_embeddings": False}
    assert sorted(decoded) == ["lm_head.weight.safetensors", "model.embed_tokens.weight.safetensors"]


def test_what_is_no_matrix_is_left_to_the_check_of_shapes(tmp_path: Path) -> None:
    number = torch.ones(())
    save_file({"wte.weight": number, "lm_head.weight": number.clone()}, tmp_path / "m.safetensors")
    assert ties.untied_if_different({"tie_word_embeddings": True}, tmp_path) == {"tie_word_embeddings": False}
