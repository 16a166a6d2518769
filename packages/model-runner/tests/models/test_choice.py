"""Native models are preferred, and transformers is imported only for other architectures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_runner import architectures
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import choice
from llmstack_model_runner.models.choice import choose_model_class
from llmstack_model_runner.models.llama import Llama
from llmstack_model_runner.testing import write_gpt2_config
from llmstack_types import ModelRunnerConfig

NATIVE_RUN = """
import sys
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import ModelRunnerConfig
runner = ModelRunner(ModelRunnerConfig(sys.argv[1], load_format="dummy", max_model_len=64, device="cpu"))
runner.load_model()
runner.initialize_kv_cache(8)
assert runner.backends()["model"] == "llmstack"
print([name for name in sys.modules if name.split(".")[0] == "transformers"])
"""


def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)


def test_auto_prefers_native_code() -> None:
    assert choose_model_class("LlamaForCausalLM") is Llama
    assert choose_model_class("LlamaForCausalLM", "llmstack") is Llama
    with pytest.raises(ValueError, match="'HeliumForCausalLM' is not supported"):
        choose_model_class("HeliumForCausalLM", "llmstack")
    with pytest.raises(ValueError, match="model_impl 'vllm' is unknown; auto, llmstack, transformers"):
        choose_model_class("LlamaForCausalLM", "vllm")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_auto_uses_transformers_for_its_other_architectures() -> None:
    for architecture, impl in (("HeliumForCausalLM", "auto"), ("LlamaForCausalLM", "transformers")):
        assert choose_model_class(architecture, impl).implementation.startswith("transformers ")
    with pytest.raises(ValueError, match=r"'NobodysLM' is not supported.* does not know it either"):
        choose_model_class("NobodysLM")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without_transformers(monkeypatch)
    for architecture, impl in (("HeliumForCausalLM", "auto"), ("LlamaForCausalLM", "transformers")):
        with pytest.raises(ValueError, match=r"pip install 'llmstack-model-runner\[transformers\]'"):
            choose_model_class(architecture, impl)


def test_a_model_of_ours_runs_without_importing_transformers(tmp_path: Path) -> None:
    write_gpt2_config(tmp_path)
    command = [sys.executable, "-c", NATIVE_RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
        ("PhiForCausalLM", {"qk_layernorm": True}),
        ("StableLmForCausalLM", {"qk_layernorm": True}),
    ],
)
def test_auto_falls_back_to_transformers_for_a_variant_that_native_code_lacks(
    architecture: str, variant: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    config = {"architectures": [architecture], "model_type": model_type, "hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
              "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
              **variant}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 32, "device": "cpu"}
    runner = ModelRunner(ModelRunnerConfig(str(tmp_path), **options))
    runner.load_model()
    runner.initialize_kv_cache(8)
    assert runner.backends()["model"].startswith("transformers ")
    assert "lacks this variant, so that of transformers runs" in caplog.text
    with pytest.raises(ValueError, match="is not supported"):
        ModelRunner(ModelRunnerConfig(str(tmp_path), model_impl="llmstack", **options)).load_model()


def test_an_architecture_of_our_own_is_found_without_a_search_of_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    def search() -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(architectures, "installed_architectures", search)
    assert choose_model_class("LlamaForCausalLM") is Llama
    with pytest.raises(AssertionError, match="searched"):
        choose_model_class("TheirLMHeadModel")
