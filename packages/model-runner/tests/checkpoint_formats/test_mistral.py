"""A checkpoint in Mistral's own form computes what the same weights in the hub's form compute."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from model_runner_helpers.picture_families import FAMILIES as FAMILIES_WITH_PICTURES
from model_runner_helpers.picture_prompts import expected as expected_of
from model_runner_helpers.picture_prompts import load_model, logits_in_chunks, prompt_of
from safetensors.torch import load_file, save_file

from llmstack_model_files import FileForm, ModelFilesError, read_model_config, resolve_model, safetensors_files
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.checkpoint_formats.mistral import MistralForm
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.layers.weight_slot import WeightPart
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.preflight import find_problems
from llmstack_model_runner.testing import StepDriver
from llmstack_model_runner.weights import load_weights, read_served_config
from llmstack_model_runner.weights.load import _read_safetensors
from llmstack_types import ModelRunnerConfig, SamplingParams

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71], [5], [9, 8, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
NUM_BLOCKS = 32
OWN = FileForm("mistral", "mistral")
SIZES: dict[str, Any] = {
    "dim": 32, "n_layers": 2, "head_dim": 8, "hidden_dim": 56, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 97, "rope_theta": 1e4, "max_position_embeddings": 256,
}  # fmt: skip
YARN = {
    "yarn": {"factor": 4, "original_max_position_embeddings": 16, "beta": 8, "alpha": 1, "apply_scale": False},
    "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1},
}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "expert_hidden_dim": 24,
            "routed_scale": 1.0, "num_shared_experts": 1, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
            "route_every_n": 1},
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Mistral with a window": {"sliding_window": 8},
    "Mistral, tied": {"tied_embeddings": True},
    "Ministral": {"sliding_window": [None, 8]},
    "Ministral3": YARN,
    "Mixtral": {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    "Mistral4": {**LATENT, **YARN, "yarn": {**YARN["yarn"], "apply_scale": True}},
}
# The hub's name of a tensor to Mistral's; groups are the layer, and the expert where there is one.
_NAMES = [
    (r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj", r"layers.\1.attention.w\2"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk]v?)_a_proj_with_mqa", r"layers.\1.attention.w\2_a_with_mqa"),
    (r"model\.layers\.(\d+)\.self_attn\.q_([ab])_proj", r"layers.\1.attention.wq_\2"),
    (r"model\.layers\.(\d+)\.self_attn\.kv_b_proj", r"layers.\1.attention.wkv_b"),
    (r"model\.layers\.(\d+)\.self_attn\.(q|kv)_a_layernorm", r"layers.\1.attention.\2_a_norm"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"layers.\1.attention_norm"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm", r"layers.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.mlp\.gate", r"layers.\1.gate"),
    (r"model\.layers\.(\d+)\.block_sparse_moe\.gate", r"layers.\1.gate"),
    (r"model\.layers\.(\d+)\.block_sparse_moe\.(experts\.\d+\.w[123])", r"layers.\1.\2"),
    (r"model\.layers\.(\d+)\.mlp\.(experts\.\d+|shared_experts)\.gate_proj", r"layers.\1.\2.w1"),
    (r"model\.layers\.(\d+)\.mlp\.(experts\.\d+|shared_experts)\.down_proj", r"layers.\1.\2.w2"),
    (r"model\.layers\.(\d+)\.mlp\.(experts\.\d+|shared_experts)\.up_proj", r"layers.\1.\2.w3"),
    (r"model\.layers\.(\d+)\.mlp\.gate_proj", r"layers.\1.feed_forward.w1"),
    (r"model\.layers\.(\d+)\.mlp\.down_proj", r"layers.\1.feed_forward.w2"),
    (r"model\.layers\.(\d+)\.mlp\.up_proj", r"layers.\1.feed_forward.w3"),
    (r"model\.embed_tokens", "tok_embeddings"),
    (r"model\.norm", "norm"),
    (r"lm_head", "output"),
]


def own_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    return next(f"{re.sub(old, new, stem)}.{kind}" for old, new in _NAMES if re.fullmatch(old, stem))


def pairs_of_heads(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of queries or keys as Mistral has them: numbers that turn together are neighbours."""
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _of_each_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that are stacked in one tensor, each under its own name."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            halves = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
            parts = {"down_proj": matrix} if kind == "down_proj" else halves
            found |= {f"{stem}.experts.{number}.{part}.weight": rows for part, rows in parts.items()}
    return found


def write_both(folder: Path, name: str) -> Any:
    """Writes a random model into `hub` and `own`, and returns transformers' model."""
    params = SIZES | FAMILIES[name]
    own, hub = folder / "own", folder / "hub"
    own.mkdir(parents=True)
    (own / "params.json").write_text(json.dumps(params))
    save_file({"x": torch.ones(1)}, own / "consolidated.safetensors")
    config = read_model_config(resolve_model(str(own)), {})
    class_name = config["architectures"][0]
    torch.manual_seed(0)
    known = {key: value for key, value in config.items() if key not in ("architectures", "dtype", "model_type")}
    made = transformers.AutoConfig.for_model(config["model_type"], **known, initializer_range=0.3)
    reference = getattr(transformers, class_name)(made).eval()
    for parameter_name, parameter in reference.named_parameters():
        if "norm" in parameter_name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(hub)
    (hub / "config.json").write_text(json.dumps(config))
    tensors = _of_each_expert(load_file(hub / "model.safetensors"))
    written = {}
    for tensor_name, tensor in tensors.items():
        known_as = own_name(tensor_name)
        is_rotated = re.search(r"attention\.w[qk]\.", known_as)
        written[known_as] = (pairs_of_heads(tensor, 8) if is_rotated else tensor).contiguous()
    save_file(written, own / "consolidated.safetensors")
    return reference


def generate(folder: Path, **options: Any) -> list[list[int]]:
    runner = ModelRunner(ModelRunnerConfig(str(folder), dtype="float32", max_model_len=64, device="cpu", **options))
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    driver = StepDriver(runner, NUM_BLOCKS)
    for number, prompt in enumerate(PROMPTS):
        driver.add(str(number), prompt, GREEDY)
    driver.run(GREEDY.max_tokens or 0)
    assert not driver.errors
    return [driver.outputs[str(number)] for number in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logits_are_those_of_the_hubs_form(name: str, tmp_path: Path) -> None:
    reference = write_both(tmp_path, name)
    folder = resolve_model(str(tmp_path / "own"), form=OWN)
    assert find_problems(ModelRunnerConfig(str(folder), max_model_len=64, load_format="mistral")) == []
    config, checkpoint_format, _ = read_served_config(ModelRunnerConfig(str(folder)))
    parts = (config, torch.float32, torch.device("cpu"))
    model = make_model(config["architectures"][0], "auto", parts, Sharding())
    load_weights(model, folder, checkpoint_format=checkpoint_format)
    with torch.no_grad():
        expected = reference(torch.tensor(PROMPTS[:1])).logits[0]
    found = PagedHarness(model, torch.float32).step([("a", PROMPTS[0])])
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    outputs = generate(folder)
    assert outputs == generate(tmp_path / "hub")
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        whole = torch.tensor([prompt + tokens])
        with torch.no_grad():
            best = reference(whole).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == tokens


def test_a_rank_reads_its_part_of_the_rows_in_the_hubs_order(tmp_path: Path) -> None:
    write_both(tmp_path, "Mistral")
    folder = resolve_model(str(tmp_path / "own"))
    expected = load_file(tmp_path / "hub" / "model.safetensors")
    form = MistralForm.of(read_model_config(folder, {}))
    for name, tensor in _read_safetensors(safetensors_files(folder), form):
        part = WeightPart(0, (range(1, 4), range(8, 9)))
        rows = [*range(1, 4), 8]
        assert torch.equal(tensor.read(None), expected.pop(name))
        assert torch.equal(tensor.read(part), tensor.read(None)[rows])
    assert not expected


PICTURE_NAMES = {
    r"vision_tower\.(patch_conv|ln_pre)": r"vision_encoder.\1",
    r"vision_tower\.(transformer\.layers\.\d+\.attention\.)([qkvo])_proj": r"vision_encoder.\1w\2",
    r"vision_tower\.(transformer\.layers\.\d+\.(?:attention|ffn)_norm)": r"vision_encoder.\1",
    r"vision_tower\.(transformer\.layers\.\d+\.feed_forward\.)gate_proj": r"vision_encoder.\1w1",
    r"vision_tower\.(transformer\.layers\.\d+\.feed_forward\.)down_proj": r"vision_encoder.\1w2",
    r"vision_tower\.(transformer\.layers\.\d+\.feed_forward\.)up_proj": r"vision_encoder.\1w3",
    r"multi_modal_projector\.norm": "pre_mm_projector_norm",
    r"multi_modal_projector\.(patch_merger\.merging_layer)": r"\1",
    r"multi_modal_projector\.linear_1": "vision_language_adapter.w_in",
    r"multi_modal_projector\.linear_2": "vision_language_adapter.w_out",
}


def test_a_model_with_pictures_computes_what_the_hubs_form_computes(tmp_path: Path) -> None:
    family, own = FAMILIES_WITH_PICTURES["mistral 3"], tmp_path / "own"
    reference = family.write(tmp_path / "hub")
    whole = json.loads((tmp_path / "hub/config.json").read_text())
    text, vision = whole["text_config"], whole["vision_config"]
    own.mkdir()
    for name in ("preprocessor_config.json", "processor_config.json"):
        (own / name).write_bytes((tmp_path / "hub" / name).read_bytes())
    kept = ("hidden_size", "image_size", "patch_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    params = {
        "dim": text["hidden_size"], "n_layers": text["num_hidden_layers"], "head_dim": 8, "rope_theta": 1e6,
        "hidden_dim": text["intermediate_size"], "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"], "norm_eps": text.get("rms_norm_eps", 1e-6),
        "vocab_size": text["vocab_size"], "max_position_embeddings": text["max_position_embeddings"],
        "vision_encoder": {name: vision[name] for name in kept} | {
            "mm_projector_id": "patch_merge", "spatial_merge_size": 2, "add_pre_mm_projector_layer_norm": True,
            "adapter_bias": False, "image_token_id": whole["image_token_index"], "rope_theta": 1e4,
        },
    }  # fmt: skip
    (own / "params.json").write_text(json.dumps(params))
    head_dim = vision["hidden_size"] // vision["num_attention_heads"]
    written = {}
    for name, tensor in load_file(tmp_path / "hub/model.safetensors").items():
        stem, _, kind = name.removeprefix("language_model.").rpartition(".")
        old = next((pattern for pattern in PICTURE_NAMES if re.fullmatch(pattern, stem)), None)
        known_as = own_name(f"{stem}.{kind}") if old is None else f"{re.sub(old, PICTURE_NAMES[old], stem)}.{kind}"
        is_rotated = re.search(r"attention\.w[qk]\.", known_as)
        size = 8 if old is None else head_dim
        written[known_as] = (pairs_of_heads(tensor, size) if is_rotated else tensor).contiguous()
    save_file(written, own / "consolidated.safetensors")
    prompt = prompt_of(family, (0, 1))
    outputs, logits = expected_of(reference, prompt, 8)
    model = load_model(resolve_model(str(own)))
    found = logits_in_chunks(model, prompt.tokens + outputs[:-1], prompt.items, 23)
    assert (found - logits).abs().max() <= 2e-5 * max(1.0, float(logits.abs().max()))


@pytest.mark.parametrize("scheme", ["TENSOR", "NO_SCALES"])
def test_weights_in_fp8_have_their_scales(scheme: str, tmp_path: Path) -> None:
    """With a scale of each tensor, as Mistral publishes them; values that FP8 holds lose nothing."""
    reference = write_both(tmp_path, "Mistral")
    own = tmp_path / "own"
    tensors = load_file(own / "consolidated.safetensors")
    quantized = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or name.startswith(("tok_embeddings", "output")):
            quantized[name] = tensor
            continue
        small = (tensor / 0.25).to(torch.float8_e4m3fn)
        quantized |= {name: small, name.replace(".weight", ".qscale_weight"): torch.tensor(0.25)}
        if scheme == "TENSOR":
            quantized[name.replace(".weight", ".qscale_act")] = torch.tensor(1.0)
        hub = next(known for known in reference.state_dict() if own_name(known) == name)
        widened = small.float() * 0.25
        if re.search(r"attention\.w[qk]\.", name):
            widened = widened.view(-1, 4, 2, widened.shape[1]).transpose(1, 2).reshape(widened.shape)
        reference.state_dict()[hub].copy_(widened)
    save_file(quantized, own / "consolidated.safetensors")
    params = json.loads((own / "params.json").read_text())
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}
    (own / "params.json").write_text(json.dumps(params))
    folder = resolve_model(str(own))
    config = read_model_config(folder, {})
    model = make_model("MistralForCausalLM", "auto", (config, torch.float32, torch.device("cpu")), Sharding())
    load_weights(model, folder, checkpoint_format=read_format(config))
    with torch.no_grad():
        expected = reference(torch.tensor(PROMPTS[:1])).logits[0]
    found = PagedHarness(model, torch.float32).step([("a", PROMPTS[0])])
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_rows_that_are_no_heads_and_zero_points_are_refused() -> None:
    form = MistralForm(8, 16, is_mixtral=False)
    order = form.order("layers.0.attention.wq.weight")
    assert order is not None
    with pytest.raises(ValueError, match="has 12 rows, which are no heads of 8"):
        order(torch.ones(12, 4))
    zero_points = form.order("layers.0.attention.wk.weight_zero_point")
    assert zero_points is not None
    with pytest.raises(ValueError, match="zero points of rows in another order"):
        zero_points(torch.ones(8, 4))
    assert form.order("layers.0.attention.wv.weight") is None
    assert form.name("layers.0.attention.unknown.weight") == "layers.0.attention.unknown.weight"


def test_a_form_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, "Mistral")
    for form, reason in (
        (FileForm("mistral"), r"hub has no params\.json"),
        (FileForm("auto", "mistral"), "hub has no"),
    ):
        with pytest.raises(ModelFilesError, match=reason):
            resolve_model(str(tmp_path / "hub"), form=form)
    folder = resolve_model(str(tmp_path / "own"))
    problems = find_problems(ModelRunnerConfig(str(folder), max_model_len=64, load_format="gguf"))
    assert problems == ["--load-format gguf: the weights of this model are in mistral files."]
