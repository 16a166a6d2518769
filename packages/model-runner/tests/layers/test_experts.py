"""Experts of a rank, where each is packed by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmstack_model_runner.layers import experts
from llmstack_model_runner.layers.experts import Experts


def test_a_rank_sums_its_choices_where_the_inputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "are_one_tensor", lambda _: False)  # as on a GPU whose kernels are the reference
    own = SimpleNamespace(_experts=range(2, 4), _compute=lambda x, places, tokens: x * (places + 1))
    ids, shares = torch.tensor([[2, 0], [3, 2], [1, 0]]), torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    x = torch.tensor([[1.0], [2.0], [3.0]])
    with torch.device("meta"):  # of tensors that are made without a device
        found = Experts._compute_own(own, x, shares, ids)  # type: ignore[arg-type]  # a rank's part of what it has
    assert found.tolist() == [[0.5], [2.5], [0.0]]
