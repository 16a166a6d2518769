"""Qwen2.5-Omni in the form of the hub: a thinker beside what speaks, which is not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from model_runner_helpers.picture_prompts import expected, generate, load_runner, prompt_of
from model_runner_helpers.sound_families import SOUND_FAMILIES
from safetensors.torch import load_file, save_file

from llmstack_model_runner.preflight import find_problems
from llmstack_types import ModelRunnerConfig

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def test_the_thinker_of_a_published_checkpoint_answers_as_transformers_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = SOUND_FAMILIES["qwen 2.5 omni"]
    reference = family.write(tmp_path)
    thinker = json.loads((tmp_path / "config.json").read_text())
    published = {
        "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "torch_dtype": "float32",
        "enable_audio_output": True, "talker_config": {"hidden_size": 8}, "thinker_config": thinker,
    }  # fmt: skip
    del thinker["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    weights = load_file(tmp_path / "model.safetensors")
    named = {f"thinker.{name}": weight for name, weight in weights.items()}
    named |= {name: torch.zeros(2) for name in ("talker.model.norm.weight", "token2wav.code2wav_dit_model.x",
                                                "thinker.audio_tower.audio_bos_eos_token.weight")}  # fmt: skip
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    assert find_problems(ModelRunnerConfig(str(tmp_path), max_model_len=512)) == []
    runner = load_runner(tmp_path)
    assert "unexpected" not in caplog.text
    for seeds in ((0, 1), (2,), ()):
        prompt = prompt_of(family, seeds)
        assert generate(runner, prompt, 23) == expected(reference, prompt)[0]
