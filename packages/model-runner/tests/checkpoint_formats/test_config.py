"""What a config.json says of quantized weights is accepted, or refused in a sentence before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_runner_helpers.quantized_layers import CASES, auto_round, compressed, gptq_config

from llmstack_model_runner.checkpoint_formats.config import (
    SMALL_FILE_BYTES,
    choose_quantization,
    gguf_activations_of,
    read_block,
    read_format,
)
from llmstack_model_runner.preflight import find_problems
from llmstack_types import ModelRunnerConfig

AWQ = CASES["awq"][0]


@pytest.mark.parametrize("case", CASES)
def test_the_formats_of_all_cases_are_known(case: str) -> None:
    fields, _ = CASES[case]
    found = read_format({"quantization_config": fields})
    assert found is not None
    assert found.num_bits == (4 if any(word in case for word in ("4", "awq")) else 8)
    assert choose_quantization({"quantization_config": fields}, found.method) == (found, None)
    if found.method in ("awq", "gptq", "compressed-tensors"):
        assert choose_quantization({"quantization_config": fields}, "int4_dynamic") == (found, "int4_dynamic")


def test_a_gguf_file_rounds_its_inputs_unless_they_are_to_be_exact() -> None:
    config = {"quantization_config": {"quant_method": "gguf"}}
    assert [choose_quantization(config, option)[1] for option in (None, "gguf", "int4_dynamic")] == ["int4_dynamic"] * 3
    assert choose_quantization(config, None, "exact") == (read_format(config), None)
    with pytest.raises(ValueError, match="exclude each other"):
        choose_quantization(config, "int4_dynamic", "exact")


@pytest.mark.parametrize(("num_bytes", "expected"), [(SMALL_FILE_BYTES - 1, "exact"), (SMALL_FILE_BYTES, "rounded")])
def test_small_gguf_files_have_exact_inputs_unless_someone_asks_for_rounded_ones(
    tmp_path: Path, num_bytes: int, expected: str
) -> None:
    files = [tmp_path / "1.gguf", tmp_path / "2.gguf"]
    for file, size in zip(files, (num_bytes - 7, 7), strict=True):
        with file.open("wb") as opened:
            opened.truncate(size)  # takes no room
    assert gguf_activations_of("auto", None, files) == expected
    assert gguf_activations_of("auto", "int4_dynamic", files) == "rounded"
    assert [gguf_activations_of(option, None, files) for option in ("rounded", "exact")] == ["rounded", "exact"]


def test_weights_in_full_precision_have_no_format() -> None:
    assert read_format({"quantization_config": None}) is None
    assert choose_quantization({}, "fp8") == (None, "fp8")
    assert choose_quantization({}, None) == (None, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("gptq", "is no object"),
        ({"quant_method": "eetq"}, "the method 'eetq' is not supported; fp8, compressed-tensors, awq"),
        ({"bits": 4}, "the method 'None' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4 is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' of modelopt"),
        (compressed("nvfp4-pack-quantized", 4, "tensor_group"), "NVFP4 is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported; e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        (AWQ | {"bits": 8}, "bits '8' is not supported; 4 is"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported; gemm is"),
        (AWQ | {"zero_point": False}, "zero_point 'False'"),
        (AWQ | {"group_size": 0}, "group_size 0 is not supported"),
        (gptq_config(3, 128), "bits '3' is not supported; 4, 8 are"),
        (gptq_config(4, 33), "group_size 33"),
        (gptq_config(4, 128, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        ({"quant_method": "bitsandbytes"}, "exactly one of load_in_4bit and load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "int32"}, "quant_storage"),
        (auto_round("llm_compressor", 32), "packing_format 'auto_round:llm_compressor' is not supported"),
        (auto_round("auto_gptq", 32, bits=3), "bits '3' is not supported; 4, 8 are"),
        (auto_round("auto_gptq", 32, data_type="mx_fp"), "data_type 'mx_fp'"),
        (auto_round("auto_gptq", 32, extra_config=[1]), "extra_config is no object"),
        (auto_round("auto_gptq", 32, extra_config={"a": {"bits": 2}}), "dynamic: bits '2' is not supported"),
        (auto_round("auto_awq", 32, extra_config={"a": {"bits": 8}}), "extra_config: bits '8' is not supported; 4 is"),
        (compressed("marlin-24", 4, "group"), "format 'marlin-24'"),
        (compressed("pack-quantized", 3, "group"), "num_bits '3' is not supported; 4, 8 are"),
        (compressed("float-quantized", 8, "token"), "strategy 'token'"),
        (compressed("int-quantized", 8, "channel") | {"quantization_status": "calibration"}, "quantization_status"),
        (compressed("float-quantized", 8, "block", block_structure=[128, 0]), "block_structure [128, 0] is not a size"),
        (compressed("float-quantized", 8, "block", block_structure="128x"), "block_structure 128x is not a size"),
        (gptq_config(4, 128, dynamic=["+:.*"]), "dynamic is no object"),
        (gptq_config(4, 128, dynamic={"+:.*": {"bits": 3}}), "dynamic: bits '3' is not supported"),
        (gptq_config(4, 128, dynamic={"+:.*": {"group_size": 33}}), "dynamic: group_size 33"),
        (compressed("int-quantized", 8, "channel") | {"transform_config": {"a": 1}}, "transform_config"),
        ({"quant_method": "compressed-tensors"}, "config_groups is no object of groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": 1}}, "config_groups.g is no object"),
    ],
)
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_what_is_not_supported_is_refused_in_a_sentence(fields: Any, message: str, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^config.json: {field}.*\.$") as caught:
        read_format({field: fields})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [[128, 64], "128x64"])
def test_a_block_may_be_a_text(given: Any) -> None:
    assert read_block({"block_structure": given}, "block_structure") == (128, 64)


def test_a_row_of_weights_may_be_a_block() -> None:
    assert read_format({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}}) is not None


def test_rounded_inputs_can_be_asked_of_checkpoints_that_were_made_for_them() -> None:
    config = {"quantization_config": CASES["compressed w8a8"][0]}
    found, scheme = choose_quantization(config, "int8_dynamic")
    assert (found, scheme) == (read_format(config), "int8_dynamic")
    for case in ("compressed w8a16", "compressed fp8", "bitsandbytes 8"):
        with pytest.raises(ValueError, match="leave out quantization 'int8_dynamic'"):
            choose_quantization({"quantization_config": CASES[case][0]}, "int8_dynamic")


@pytest.mark.parametrize("option", ["int8", "fp8", "gptq"])
def test_an_option_that_contradicts_the_checkpoint_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"quantized already \(by awq\), so leave out quantization '{option}'"):
        choose_quantization({"quantization_config": AWQ}, option)


def test_a_format_of_checkpoints_cannot_be_asked_of_weights_in_full_precision() -> None:
    with pytest.raises(ValueError, match=r"awq names a format of checkpoints.*full precision"):
        choose_quantization({}, "awq")


def preflight_problems(folder: Path, fields: dict[str, Any], architecture: str, **options: Any) -> list[str]:
    config = {"architectures": [architecture], "quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(config))
    return find_problems(ModelRunnerConfig(str(folder), load_format="dummy", **options))


def test_the_preflight_refuses_what_the_configuration_tells(tmp_path: Path) -> None:
    assert preflight_problems(tmp_path, AWQ, "LlamaForCausalLM") == []
    assert preflight_problems(tmp_path, AWQ, "LlamaForCausalLM", quantization="awq") == []
    (found,) = preflight_problems(tmp_path, {"quant_method": "nvfp4"}, "LlamaForCausalLM")
    assert "NVFP4 is not supported" in found
    (found,) = preflight_problems(tmp_path, AWQ, "LlamaForCausalLM", quantization="int4")
    assert "quantized already (by awq)" in found
    assert preflight_problems(tmp_path, AWQ, "LlamaForCausalLM", model_impl="transformers") == []
    (found,) = preflight_problems(tmp_path, {"quant_method": "gguf"}, "BertModel")
    assert "gguf files of BertModel cannot be read" in found


def test_the_preflight_needs_no_torch_to_read_a_format(tmp_path: Path) -> None:
    preflight_problems(tmp_path, AWQ, "LlamaForCausalLM")
    program = (
        "import sys\nfrom llmstack_model_runner.preflight import find_problems\n"
        "from llmstack_types import ModelRunnerConfig\n"
        f"assert find_problems(ModelRunnerConfig({str(tmp_path)!r}, load_format='dummy')) == []\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
