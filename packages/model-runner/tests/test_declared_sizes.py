"""The bound of a model's parameters, against the models of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

from llmstack_model_runner.architectures import ARCHITECTURES
from llmstack_model_runner.declared_sizes import least_parameters


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_model_has_fewer_parameters_than_the_bound(architecture: str) -> None:
    model_class = getattr(transformers, architecture)
    config = model_class.config_class()
    with torch.device("meta"):
        model = model_class._from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters / 256 < least_parameters(config.to_dict()) <= num_parameters
