"""Encoders with decoders of transformers, tiny: each is served as its own code computes, or refused with a reason."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from model_runner_helpers.every_class import random_model, small_config  # noqa: E402

from llmstack_model_runner.models.transformers_backend.encoder_decoder import TransformersEncoderDecoder  # noqa: E402
from llmstack_model_runner.models.transformers_backend.resolve import UnsupportedByTransformersError  # noqa: E402
from llmstack_model_runner.weights import load_weights  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of many classes, at their import

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "models.md"
SERVED = (
    "BartForConditionalGeneration", "BlenderbotForConditionalGeneration", "BlenderbotSmallForConditionalGeneration",
    "LongT5ForConditionalGeneration", "M2M100ForConditionalGeneration", "MBartForConditionalGeneration",
    "MT5ForConditionalGeneration", "MarianMTModel", "PLBartForConditionalGeneration",
    "PegasusForConditionalGeneration", "T5ForConditionalGeneration", "UMT5ForConditionalGeneration",
)  # fmt: skip
REFUSED = {
    "BigBirdPegasusForConditionalGeneration": "picks tokens at random",
    "LEDForConditionalGeneration": "running it raises",
    "MvpForConditionalGeneration": "running it raises",
    "NllbMoeForConditionalGeneration": "running it raises",
    "PegasusXForConditionalGeneration": "it decodes otherwise",
    "ProphetNetForConditionalGeneration": "running it raises",
    "SwitchTransformersForConditionalGeneration": "running it raises",
}
QUICK = ("T5ForConditionalGeneration", "LEDForConditionalGeneration")


def load(architecture: str, folder: Path, dtype: torch.dtype = torch.float32) -> TransformersEncoderDecoder:
    model_class = getattr(transformers, architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = small_config(model_class.config_class, {"num_heads": 4, "d_kv": 8, "decoder_start_token_id": 1})
        random_model(model_class, config).save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text())
        model = TransformersEncoderDecoder(values, dtype, torch.device("cpu"))
        load_weights(model, folder)
        return model


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in SERVED]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_its_own_code_does(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """It compares a trial with its own code itself, and raises where they differ."""
    model = load(architecture, tmp_path, dtype)
    assert model.media_encoder().max_num_tokens == {"text": model.kv_spec.max_model_len}


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in REFUSED]
)
def test_what_cannot_run_is_refused_with_a_reason(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedByTransformersError, match=REFUSED[architecture]):
        load(architecture, tmp_path)


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the documentation is not part of the distribution")
def test_the_documentation_names_the_served_classes() -> None:
    listed = DOCUMENT.read_text().partition("## Encoders with decoders\n")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in listed for name in SERVED)
    assert not any(f"`{name}`" in listed for name in REFUSED)
