"""What is wrong with a model is known before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmstack_model_runner import preflight
from llmstack_model_runner.device.host_limits import memory_limit_bytes
from llmstack_model_runner.preflight import PACKING_SHARE, PROCESS_BYTES, find_problems, find_room_problem
from llmstack_types import ModelRunnerConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "vocab_size": 100,
}  # fmt: skip
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2  # keys and values of 2 layers, 2 heads of 16 in 16 bits
WEIGHT_BYTES = 1000 * 64 * 4
DECLARED_BYTES = (100 * 64 + 2 * 2 * 64 * 64) * 2  # the embedding and the attention of 2 layers in 16 bits


def write_model(folder: Path, *, has_weights: bool = True, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    if has_weights:
        save_file({"w": torch.zeros(1000, 64)}, folder / "model.safetensors")
    return str(folder)


def write_limit(root: Path, num_bytes: int) -> Path:
    group = root / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/box\n")
    (root / "proc/meminfo").write_text("MemTotal: 1000000000 kB\n")
    (group / "memory.max").write_text(f"{num_bytes}\n")
    return root


def problems(folder: str, root: Path, **options: Any) -> list[str]:
    sizes = {name: options.pop(name) for name in ("num_blocks", "kv_cache_bytes", "is_max_model_len_explicit")
             if name in options}  # fmt: skip
    return find_problems(ModelRunnerConfig(folder, **options), root=root, **sizes)


def test_a_model_that_fits_has_no_problems(tmp_path: Path) -> None:
    root = write_limit(tmp_path / "root", WEIGHT_BYTES + 16 * TOKEN_BYTES)
    assert problems(write_model(tmp_path / "m"), root) == []


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, WEIGHT_BYTES + 16 * TOKEN_BYTES),
        ({"max_model_len": 100, "is_max_model_len_explicit": True}, WEIGHT_BYTES + 100 * TOKEN_BYTES),
        ({"num_blocks": 10}, WEIGHT_BYTES + 160 * TOKEN_BYTES),
        ({"kv_cache_bytes": 5000}, WEIGHT_BYTES + 5000),
        ({"kv_cache_dtype": "fp8"}, WEIGHT_BYTES + 8 * TOKEN_BYTES),
        ({"kv_cache_dtype": "fp8_e4m3"}, WEIGHT_BYTES + 8 * TOKEN_BYTES),
        ({"dtype": "bfloat16"}, WEIGHT_BYTES // 2 + 16 * TOKEN_BYTES),
        ({"dtype": "half"}, WEIGHT_BYTES // 2 + 16 * TOKEN_BYTES),
        ({"quantization": "int4"}, WEIGHT_BYTES // 8 + 16 * TOKEN_BYTES),
        ({"load_format": "dummy"}, DECLARED_BYTES + 16 * TOKEN_BYTES),
        ({"load_format": "dummy", "dtype": "float32"}, 2 * DECLARED_BYTES + 16 * TOKEN_BYTES),
    ],
)
def test_memory_below_weights_and_the_least_kv_cache_is_refused(
    options: dict[str, Any], needed: int, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m")
    assert problems(folder, write_limit(tmp_path / "enough", needed), **options) == []
    [found] = problems(folder, write_limit(tmp_path / "short", needed - 1), **options)
    assert f"the memory limit is {(needed - 1) / 2**20:.1f} MiB; use a smaller model" in found
    assert "a smaller KV cache (--kv-cache-memory-bytes, --num-kv-blocks)." in found


def test_engine_cores_that_do_not_fit_beside_each_other_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    needed = 3 * (PROCESS_BYTES + WEIGHT_BYTES + 16 * TOKEN_BYTES)
    assert problems(folder, write_limit(tmp_path / "enough", needed), num_engines=3) == []
    [found] = problems(folder, write_limit(tmp_path / "short", needed - 1), num_engines=3)
    assert found.startswith("3 engine cores need at least 0.6 GiB, and the memory limit is ")
    assert problems(folder, write_limit(tmp_path / "one", PROCESS_BYTES)) == []


def test_numbers_of_quantized_weights_keep_their_bytes(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    folder = Path(write_model(tmp_path / "m", has_weights=False, quantization_config=quantization))
    numbers, scales = torch.zeros(1000, 64, dtype=torch.int32), torch.zeros(1000, 64)
    save_file({"w.qweight": numbers, "w.scales": scales}, folder / "model.safetensors")
    needed = 1000 * 64 * (4 + 2) + 16 * TOKEN_BYTES  # the scales in the type of the model
    enough, short = (write_limit(tmp_path / name, needed - less) for name, less in (("enough", 0), ("short", 1)))
    assert problems(str(folder), enough, dtype="bfloat16") == []
    assert len(problems(str(folder), short, dtype="bfloat16")) == 1


def test_a_load_format_that_is_not_that_of_the_files_is_refused(tmp_path: Path) -> None:
    folder, root = write_model(tmp_path / "m"), write_limit(tmp_path / "root", 1 << 40)
    for load_format in ("auto", "safetensors", "dummy"):
        assert problems(folder, root, load_format=load_format) == []
    said = ["--load-format gguf: the weights of this model are in safetensors files."]
    assert problems(folder, root, load_format="gguf") == said


def test_the_memory_of_a_gpu_is_not_guessed(tmp_path: Path) -> None:
    root = write_limit(tmp_path / "root", 1)
    folder = write_model(tmp_path / "m")
    assert problems(folder, root, device="cuda") == []
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    assert problems(folder, root) == []
    assert len(problems(folder, root, device="cpu")) == 1


def test_layers_with_windows_need_less_than_the_whole_request(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", sliding_window=32)
    root = write_limit(tmp_path / "root", WEIGHT_BYTES + 16 * TOKEN_BYTES)
    assert problems(folder, root, max_model_len=1000, is_max_model_len_explicit=True) == []


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    config = {"architectures": ["NoSuchForCausalLM"], "quantization_config": {"quant_method": "quip"}}
    folder = write_model(tmp_path / "m", has_weights=False, **config)
    found = problems(folder, write_limit(tmp_path / "root", 1 << 40))
    for text, word in zip(found, ("NoSuchForCausalLM", "'quip'", "no safetensors weights"), strict=True):
        assert word in text


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("sizes", [{"hidden_size": 10**9}, {"vocab_size": 10**12}, {"intermediate_size": 10**9}])
def test_sizes_beyond_memory_are_refused_with_any_weights(sizes: Any, load_format: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **sizes)
    [found] = problems(folder, write_limit(tmp_path / "root", 8 << 30), load_format=load_format)
    assert found.startswith("the model needs at least ")
    assert "the memory limit is 8.0 GiB" in found


@pytest.mark.parametrize("value", [-64, 0, "64", 64.5, [64], {"a": 64}, True])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"])
def test_sizes_that_are_no_positive_integers_are_named(name: str, value: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", has_weights=False, **{name: value})
    found = problems(folder, write_limit(tmp_path / "root", 1 << 30), load_format="dummy")
    assert found == [f"config.json: {name} must be a positive integer, got {value!r}."]


def test_a_million_layers_of_dummy_weights_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", has_weights=False, num_hidden_layers=1_000_000)
    [found] = problems(folder, write_limit(tmp_path / "root", 1 << 40), load_format="dummy")
    assert found == "config.json: the model has 1000000 layers; at most 4096 can have dummy weights."


def test_an_architecture_of_transformers_is_left_to_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m", architectures=["OlmoForCausalLM"])
    root = write_limit(tmp_path / "root", 1 << 40)
    pytest.importorskip("transformers")
    assert problems(folder, root) == []
    assert "model_impl llmstack" in problems(folder, root, model_impl="llmstack")[0]
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert "pip install" in problems(folder, root)[0]
    assert "pip install" in problems(folder, root, model_impl="transformers")[0]


def test_tensors_that_cannot_be_those_of_the_configuration_are_problems(tmp_path: Path) -> None:
    root = write_limit(tmp_path / "root", 1 << 36)
    (found,) = problems(write_model(tmp_path / "m", num_hidden_layers=1_000_000), root, block_size=1)
    assert found == "config.json: the model has 1000000 layers, and the weights have only 1 tensors."
    folder = Path(write_model(tmp_path / "f", has_weights=False))
    save_file({"w": torch.ones(4, 4).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    (found,) = problems(str(folder), root)
    assert found.startswith("w is stored as F8_E4M3, and config.json has no quantization_config")


def test_modelopts_own_file_describes_the_quantization(tmp_path: Path) -> None:
    root = write_limit(tmp_path / "root", 1 << 30)
    folder = Path(write_model(tmp_path / "m", has_weights=False))
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({"w.weight": weight, "w.weight_scale": torch.tensor(1.0)}, folder / "model.safetensors")
    for algorithm, expected in (("FP8", None), ("NVFP4", "config.json: quantization_config: NVFP4 is not supported")):
        description = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        (folder / "hf_quant_config.json").write_text(json.dumps(description))
        found = problems(str(folder), root)
        assert found == [] if expected is None else found[0].startswith(expected)


def test_a_missing_shard_and_a_damaged_file_are_problems(tmp_path: Path) -> None:
    root = write_limit(tmp_path / "root", 1 << 40)
    folder = Path(write_model(tmp_path / "m", has_weights=False))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert "model-1.safetensors, which is missing" in problems(str(folder), root)[0]
    (folder / "model.safetensors").write_bytes(b"nonsense" * 10)
    assert "damaged" in problems(str(folder), root)[0]
    assert problems(str(folder), root, load_format="dummy") == []


def test_the_least_of_all_limits_holds(tmp_path: Path) -> None:
    assert memory_limit_bytes(write_limit(tmp_path / "root", 12345)) == 12345
    assert memory_limit_bytes(write_limit(tmp_path / "more", 1 << 50)) == 1_000_000_000 * 1024
    assert memory_limit_bytes(tmp_path) is None


def test_the_checks_need_no_torch() -> None:
    program = "import sys; import llmstack_model_runner.preflight; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, {"tensor_parallel_size": 4}, "6 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, {"tensor_parallel_size": 2}, "3 key-value heads"),
        ({"num_hidden_layers": 2}, {"pipeline_parallel_size": 3}, "only 2 layers"),
        ({"architectures": ["BertModel"]}, {"tensor_parallel_size": 2}, "BertModel with model_impl auto cannot"),
        ({"architectures": ["LlamaModel"]}, {"pipeline_parallel_size": 2}, "LlamaModel with model_impl auto cannot"),
        ({}, {"tensor_parallel_size": 2, "model_impl": "transformers"}, "model_impl transformers cannot"),
        ({}, {"tensor_parallel_size": 2, "device": "cuda"}, "2 ranks need a GPU each, and the machine has 0"),
        (
            {"num_experts": 2},
            {"tensor_parallel_size": 4, "enable_expert_parallel": True},
            "2 experts, which cannot be spread over tensor_parallel_size 4",
        ),
        ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "the model has no experts, which"),
    ],
)
def test_ranks_that_cannot_share_a_model_out_are_refused_with_both_numbers(
    tmp_path: Path, changes: dict[str, object], sizes: dict[str, Any], words: str
) -> None:
    model = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 4, "hidden_size": 48}
    config = {"architectures": ["LlamaForCausalLM"], **model, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = ModelRunnerConfig(str(tmp_path), load_format="dummy", **{"device": "cpu", **sizes})
    (problem,) = find_problems(runner, root=tmp_path / "empty")
    assert words in problem


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["T5Model"], "model_type": "t5"}, "an encoder-decoder model"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"a": 1}}, "a vision model"),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "a state-space model"),
        ({"architectures": ["ZambaForCausalLM"], "model_type": "zamba"}, "a hybrid of attention and recurrent layers"),
        (
            {"architectures": ["Speech2TextForConditionalGeneration"], "model_type": "speech_to_text"},
            "a model of speech",
        ),
        ({"architectures": ["ViTForImageClassification"], "model_type": "vit"}, "a vision model without text"),
        ({"architectures": ["ASTForAudioClassification"]}, "a model of speech"),
        (
            {"architectures": ["GraniteSpeechPlusForConditionalGeneration"], "model_type": "granite_speech_plus"},
            "a model of speech",
        ),
    ],
)
def test_a_model_of_another_kind_is_called_that_before_anything_starts(
    config: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    (found,) = problems(write_model(tmp_path / "m", **config), write_limit(tmp_path / "root", 1 << 40))
    assert f"{config['architectures'][0]} is {kind}" in found
    assert "LlamaForCausalLM" in found


def test_a_second_process_needs_room_in_the_memory_that_is_free_now(tmp_path: Path) -> None:
    config = ModelRunnerConfig(write_model(tmp_path / "m"))
    needed = PROCESS_BYTES + WEIGHT_BYTES + WEIGHT_BYTES // PACKING_SHARE + 64 * 16 * TOKEN_BYTES
    kilobytes = -(-needed // 1024)
    (tmp_path / "proc").mkdir()
    for num_free, is_enough in ((kilobytes, True), (kilobytes - 1, False)):
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1000000000 kB\nMemAvailable: {num_free} kB\n")
        problem = find_room_problem(config, num_blocks=64, root=tmp_path)
        assert (problem == "") is is_enough
        assert is_enough or "GiB are free" in problem
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1000000000 kB\nMemAvailable: {2 * kilobytes - 2} kB\n")
    replicas = replace(config, num_engines=2)
    assert "2 more engine cores need" in find_room_problem(replicas, num_blocks=64, root=tmp_path)
    assert find_room_problem(config, num_blocks=64, root=tmp_path / "empty") == ""
