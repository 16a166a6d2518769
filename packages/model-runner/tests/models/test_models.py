"""The table of models is closed, configurations are checked, and a real trained model writes its published story."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_model_files import text_config_of
from llmstack_model_runner.models import load_model_class, supported_architectures
from llmstack_model_runner.models.gpt2 import GPT2
from llmstack_model_runner.models.kv_spec import keys_and_values
from llmstack_model_runner.weights import load_weights

STORIES = Path(__file__).resolve().parents[4].parent / "shared" / "models" / "stories260k"
CPU = torch.device("cpu")
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 50,
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, which waits long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared model stories260k is not there")
def test_stories260k_writes_its_published_story() -> None:
    golden = json.loads((STORIES / "golden.json").read_text())
    config = json.loads((STORIES / "config.json").read_text())
    model = load_model_class(config["architectures"][0])(config, torch.float32, CPU)
    load_weights(model, STORIES)
    harness = PagedHarness(model, torch.float32, num_blocks=64, block_size=16)
    cases = [golden["published"], *golden["greedy_from_transformers_float32"]]
    for number, case in enumerate(cases):
        expected = case["output_token_ids"]
        assert harness.greedy(case["prompt_token_ids"], len(expected), f"case {number}") == expected


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'NobodysLMHeadModel' is not supported; supported are .*GPT2LMHeadModel, "):
        load_model_class("NobodysLMHeadModel")


def test_every_architecture_of_the_table_loads() -> None:
    assert {load_model_class(name).__name__ for name in supported_architectures()} >= {"GPT2", "Llama", "OPT", "Qwen3"}


def install_distribution(folder: Path, name: str, entry_points: str) -> None:
    """The metadata of an installed distribution, as pip leaves it in a folder of `sys.path`."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def test_installed_packages_add_architectures_but_replace_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "their_models.py").write_text(
        "from llmstack_model_runner.models.gpt2 import GPT2\n\nclass TheirModel(GPT2):\n    pass\n"
    )
    lines = [f"{name} = their_models:TheirModel" for name in ("TheirLMHeadModel", "LlamaForCausalLM")]
    install_distribution(tmp_path, "their_models", "\n".join(["[llmstack.architectures]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    assert load_model_class("TheirLMHeadModel").__name__ == "TheirModel"
    assert load_model_class("LlamaForCausalLM").__name__ == "Llama"
    assert "TheirLMHeadModel" in supported_architectures()
    assert not caplog.records


def test_the_old_entry_point_group_is_read_with_a_deprecation_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = "llmstack_model_runner.models.gpt2:GPT2"
    install_distribution(
        tmp_path,
        "older_models",
        f"[llmstack.models_out_of_tree]\nOlderLMHeadModel = {target}\nMovedLMHeadModel = nowhere:Model\n"
        f"[llmstack.architectures]\nMovedLMHeadModel = {target}\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert {"OlderLMHeadModel", "MovedLMHeadModel"} <= set(supported_architectures())
    assert load_model_class("MovedLMHeadModel") is GPT2
    assert not caplog.records
    assert load_model_class("OlderLMHeadModel") is GPT2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "architecture OlderLMHeadModel: the entry point group llmstack.models_out_of_tree is deprecated "
        "and is not read from 0.3 on; use llmstack.architectures"
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("LlamaForCausalLM", {"hidden_size": "16"}, "hidden_size"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("LlamaForCausalLM", {"num_attention_heads": 3, "num_key_value_heads": 2}, "share"),
        ("LlamaForCausalLM", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("LlamaForCausalLM", {"mlp_bias": 1}, "mlp_bias"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "must be an object"),
        ("LlamaForCausalLM", {"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ("LlamaForCausalLM", {"rope_theta": "10000"}, "rope_theta must be a positive number"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": -1.0}},
            "factor must be a positive number",
        ),
        ("GPT2LMHeadModel", {"n_embd": 10, "n_head": 3}, "multiple"),
        ("GPT2LMHeadModel", {"activation_function": "swish"}, "swish"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
        ("OPTForCausalLM", {"num_attention_heads": 3}, "multiple"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4}},
            "long_factor must",
        ),
        ("LlamaForCausalLM", {"rope_scaling": LONG_ROPE | {"short_factor": [1.0]}}, "short_factor must have 4 numbers"),
        ("LlamaForCausalLM", {"rope_scaling": LONG_ROPE | {"long_factor": [1, 1, 1, 0]}}, "positive numbers"),
        ("PhiForCausalLM", {"partial_rotary_factor": 0.4}, "3 of a head's 8 dimensions"),
        ("PhiForCausalLM", {"partial_rotary_factor": 2.0}, "16 of a head's 8 dimensions"),
        ("LlamaForCausalLM", {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "no finite angles"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}},
            "of the yarn rotary embedding give no finite angles",
        ),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu", "num_key_value_heads": 2}, "activation 'gelu'"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("GPTNeoXForCausalLM", {"hidden_size": 15}, "multiple"),
        ("GPTJForCausalLM", {"n_embd": 16, "n_head": 2, "rotary_dim": 10}, "rotary_dim"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 3}, "share"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "num_experts must"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused_by_field(
    architecture: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load_model_class(architecture)(LLAMA | changes, torch.float32, CPU)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("LlamaForCausalLM", {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}),
        ("MistralForCausalLM", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}),
        ("Qwen3ForCausalLM", {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}),
    ],
)
def test_true_shapes_are_read_from_the_configuration(architecture: str, config: dict[str, Any]) -> None:
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32, "max_position_embeddings": 128}
    model = load_model_class(architecture)(sizes | config, torch.bfloat16, CPU)
    assert model.kv_spec.head_dim == 128
    num_kv_heads = config.get("num_key_value_heads", 32)
    assert model.kv_spec.layers == (keys_and_values(num_kv_heads, 128),)
    assert model.kv_spec.max_model_len == 128
    slots = model.slots()
    assert slots["model.layers.0.self_attn.k_proj.weight"].shape == (
        num_kv_heads * 128,
        config["hidden_size"],
    )


def test_gemma_3_with_vision_fills_in_what_its_configuration_leaves_out() -> None:
    given = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "sliding_window": 1024,
        "vocab_size": 50,
    }
    scaling = {"rope_type": "linear", "factor": 8.0}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": given | {"rope_scaling": scaling}}
    config = text_config_of(whole)
    settings = load_model_class(config["architectures"][0]).read_settings(config)  # type: ignore[attr-defined]  # of the Llama family
    assert (settings.max_model_len, settings.is_tied) == (131_072, True)
    assert [layer.sliding_window for layer in settings.layers] == [1024] * 5 + [None, 1024]
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in settings.layers} == {(8, 4, 256)}
    assert [(layer.rope.kind, layer.rope.theta) for layer in settings.layers[4:6]] == [
        ("default", 10_000.0),
        ("linear", 1_000_000.0),
    ]


def test_gpt_neox_reads_the_names_of_published_checkpoints() -> None:
    config = {"intermediate_size": 64, "max_position_embeddings": 32, "rotary_pct": 0.5, "rotary_emb_base": 500}
    model_class = load_model_class("GPTNeoXForCausalLM")
    rope = model_class.read_settings(LLAMA | config).rope  # type: ignore[attr-defined]  # of the decoders with layer norms
    assert (rope.rotary_dim, rope.theta) == (4, 500.0)
    model = model_class(LLAMA | config, torch.float32, CPU)
    weights = {name: torch.zeros(slot.shape) for name, slot in model.slots().items()}
    weights["embed_out.weight"] = weights.pop("lm_head.weight")
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 32, 32)  # the causal mask of old checkpoints
    model.load_weights(weights.items())


def test_one_layer_of_a_large_model_runs_with_made_up_weights() -> None:
    config = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = load_model_class("LlamaForCausalLM")(
        {"intermediate_size": 2048, "vocab_size": 1000, **config}, torch.bfloat16, CPU
    )
    load_weights(model, "", "dummy")
    assert PagedHarness(model, torch.bfloat16).step([("a", [1, 2, 3])]).isfinite().all()
