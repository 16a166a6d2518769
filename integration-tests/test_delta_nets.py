"""Delta nets with experts and adapters: ranks, chunks and hits write the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_runner_helpers.merged import write_merged
from safetensors.torch import load_file, save_file

from llmstack_kernels.native.capture import CapturedCalls
from llmstack_kernels.testing import runs_native_kernels
from llmstack_llm import LLM, LoRARequest, SamplingParams
from llmstack_model_runner.testing import write_random_adapter

VOCAB_SIZE, NUM_TOKENS = 97, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {"next": ("Qwen3NextForCausalLM", {"intermediate_size": 48, "mlp_only_layers": [1]}), "3.5": (
    "Qwen3_5MoeForCausalLM", {})}  # fmt: skip
PROMPTS = [[(7 * i + 3) % VOCAB_SIZE for i in range(30 * n)] + [n + 1, 5] for n in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """With the names and the older configuration of the hub: a tensor per expert, no `layer_types`."""
    architecture, others = MODELS[request.param]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**SIZES, **others)).eval()
    folder = tmp_path_factory.mktemp("delta_nets")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    published = {"full_attention_interval": 4, "rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}
    (folder / "config.json").write_text(json.dumps(config | published))
    return folder, model


def tokens_of(folder: Path, lora_request: LoRARequest | None = None, **options: Any) -> list[list[int]]:
    """What an engine writes for each prompt, which is the same when the prompts are found again."""
    with LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", num_kv_blocks=200, max_model_len=200, **options
    ) as llm:
        found = []
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, lora_request=lora_request, use_tqdm=False
            )
            found.append([list(output.outputs[0].token_ids) for output in outputs])
        assert found[0] == found[1]
        return found[0]


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        output = checkpoint[1].generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS, do_sample=False,
        )  # fmt: skip
        found.append(output[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 23},
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 7}, marks=pytest.mark.full),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.full),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: tuple[Path, Any], expected: list[list[int]], options: dict[str, Any]
) -> None:
    assert tokens_of(checkpoint[0], **options) == expected


@pytest.mark.full
def test_an_adapter_writes_the_tokens_of_its_merged_weights(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    names = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]
    adapter = write_random_adapter(tmp_path / "adapter", checkpoint[0], [*names, "shared_expert.up_proj"], spread=0.05)
    plain, merged = tmp_path / "plain", tmp_path / "merged"
    plain.mkdir()
    for file in checkpoint[0].glob("*.json"):
        (plain / file.name).write_text(file.read_text())
    save_file(load_file(checkpoint[0] / "model.safetensors"), plain / "model.safetensors")
    write_merged(merged, plain, adapter)
    wanted = tokens_of(merged)
    assert wanted != tokens_of(checkpoint[0])
    for options in ({"max_num_batched_tokens": 23}, {"tensor_parallel_size": 2}):
        assert tokens_of(checkpoint[0], LoRARequest("a", 1, str(adapter)), enable_lora=True, **options) == wanted


@pytest.mark.skipif(not runs_native_kernels(), reason="only native steps are captured")
def test_captured_decodes_have_the_bits_of_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the dense model, in waves, so that rows come, go and take other states."""
    replays = []
    replay = CapturedCalls.replay
    monkeypatch.setattr(CapturedCalls, "replay", lambda calls: replays.append(len(calls)) or replay(calls))
    torch.manual_seed(4)
    sizes = {name: value for name, value in SIZES.items() if "expert" not in name and "moe" not in name}
    made = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes, intermediate_size=96))
    made.save_pretrained(tmp_path)
    params = [SamplingParams(temperature=0.0, max_tokens=3 + 5 * n, ignore_eos=True, logprobs=1) for n in range(6)]
    answers = []
    for is_eager in (True, False):
        with LLM(
            str(tmp_path), skip_tokenizer_init=True, dtype="float32", num_kv_blocks=200, max_model_len=200,
            max_num_seqs=3, enforce_eager=is_eager,
        ) as llm:  # fmt: skip
            found = []
            for _ in range(2):
                outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
                found.append([output.outputs[0].logprobs for output in outputs])
            answers.append(found)
            assert (len(replays) > 20) == (not is_eager)
    assert answers[0] == answers[1]
