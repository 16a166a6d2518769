"""Configurations of models with state spaces that make no model are refused by the field's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_runner_helpers.mamba_cases import BAMBA, FALCON, GRANITE, MAMBA2, NEMOTRON

from llmstack_model_runner.models import load_model_class


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("Bamba", BAMBA | {"mamba_d_head": 7}, "8 mamba heads of 7 are not the inner size 64"),
        ("Bamba", BAMBA | {"mamba_n_groups": 3}, "8 mamba heads cannot share 3 mamba groups"),
        ("Bamba", BAMBA | {"mamba_d_conv": 1}, "a length of at least 2, got 1"),
        ("Bamba", BAMBA | {"time_step_limit": [0.5]}, "time_step_limit must be two numbers"),
        ("Bamba", BAMBA | {"time_step_limit": [0.5, 0.1]}, "time_step_limit must be ascending"),
        ("Bamba", BAMBA | {"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ("GraniteMoeHybrid", GRANITE | {"layer_types": ["mamba"]}, "layer_types must name each layer"),
        ("GraniteMoeHybrid", GRANITE | {"logits_scaling": 0}, "logits_scaling must not be 0"),
        ("FalconH1", FALCON | {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
        ("FalconH1", FALCON | {"mlp_multipliers": [0.0, 1.0]}, "mlp_multipliers must not be 0"),
        ("FalconH1", FALCON | {"mlp_bias": True}, "mlp_bias with a multiplier of the gate"),
        ("NemotronH", NEMOTRON | {"layers_block_type": ["mlp", "mamba"]}, "begin with a feed-forward"),
        ("NemotronH", NEMOTRON | {"layers_block_type": ["mamba", "dense"]}, "blocks must be of the kinds"),
        ("NemotronH", NEMOTRON | {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ("NemotronH", NEMOTRON | {"n_group": 4}, "6 experts do not form 4 groups"),
        ("Mamba2", MAMBA2 | {"num_heads": 7}, "7 heads of 8 are not the inner size"),
    ],
)  # fmt: skip
def test_a_configuration_that_makes_no_model_is_refused(
    architecture: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_class(f"{architecture}ForCausalLM")(config, torch.float32, torch.device("cpu"))
