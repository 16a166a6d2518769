"""A head that the configuration ties is read where its values are others."""

from __future__ import annotations

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


def test_what_is_no_matrix_is_left_to_the_check_of_shapes(tmp_path: Path) -> None:
    number = torch.ones(())
    save_file({"wte.weight": number, "lm_head.weight": number.clone()}, tmp_path / "m.safetensors")
    assert ties.untied_if_different({"tie_word_embeddings": True}, tmp_path) == {"tie_word_embeddings": False}
