"""Drafts from hidden states: those of a reference in PyTorch, right as often, and no text depends on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import state_engine
from draft_engine import Checkpoint, Guesses, count_right, record_guesses, run
from draft_references import NUM_TOKENS, PROMPTS, DFlash, Eagle, Eagle3, Medusa, OwnLayer, Reference, Speculator
from model_runner_helpers import tiny_configs as tiny

from llmstack_llm import LLM, LoRARequest
from llmstack_llm import SamplingParams as Sampling
from llmstack_model_runner.testing import write_random_adapter
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify

QWEN = state_engine.QWEN3_5 | {"initializer_range": 0.2}
NEXT = QWEN | {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = tiny.DEEPSEEK | {"max_position_embeddings": 256}
OF_QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
BEHIND = "model.layers.3."
OF_DEEPSEEK = (BEHIND, f"{BEHIND}enorm", f"{BEHIND}hnorm", f"{BEHIND}eh_proj", f"{BEHIND}shared_head.norm")
GLM = {name: value for name, value in DEEPSEEK.items() if "_lora_" not in name and "head_dim" not in name} | {
    "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
MIMO = QWEN | {"num_hidden_layers": 3, "layer_types": None}
OF_MIMO = tuple(f"model.mtp_layers.0.{name}" for name in
                ("", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))  # fmt: skip
ERNIE = {name: value for name, value in GLM.items() if name not in ("use_qk_norm", "attention_bias")} | {
    "moe_num_experts": 6, "moe_k": 3, "moe_layer_start_index": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
OF_ERNIE = tuple(f"model.mtp_{name}" for name in ("block.0.", "emb_norm.0", "hidden_norm.0", "linear_proj.0"))
NEMOTRON = state_engine.NEMOTRON | {"initializer_range": 0.3}
OF_NEMOTRON = tuple(f"mtp.layers.{name}" for name in ("", "0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm"))
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
ONE_SPARSE = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
KINDS: dict[str, Callable[[], Reference]] = {
    "Qwen3_5Text": lambda: OwnLayer("Qwen3_5", QWEN, ONE_LAYER, OF_QWEN),
    "Qwen3Next": lambda: OwnLayer("Qwen3Next", NEXT, ONE_LAYER, OF_QWEN),
    "DeepseekV3": lambda: OwnLayer("DeepseekV3", DEEPSEEK, ONE_SPARSE, OF_DEEPSEEK),
    "Glm4Moe": lambda: OwnLayer("Glm4Moe", GLM, ONE_SPARSE, OF_DEEPSEEK),
    "MiMo": lambda: OwnLayer(
        "Qwen2",
        MIMO,
        ONE_LAYER,
        OF_MIMO,
        is_hidden_first=True,
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
    ),
    "Ernie4_5_Moe": lambda: OwnLayer("Ernie4_5_Moe", ERNIE, {"num_hidden_layers": 1}, OF_ERNIE),
    "NemotronH": lambda: OwnLayer("NemotronH", NEMOTRON, {"layers_block_type": ["attention", "moe"]}, OF_NEMOTRON),
    "eagle": Eagle,
    "eagle3": Eagle3,
    "speculators": Speculator,
    "medusa": Medusa,
    "dflash": DFlash,
}
MASKED = {"allowed_token_ids": list(range(0, 97, 3)), "min_tokens": 9}
BY_DEFAULT = ("Qwen3_5Text", "eagle3", "medusa", "dflash")


@pytest.fixture(
    scope="module",
    params=[name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in KINDS],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.write(KINDS[request.param](), tmp_path_factory.mktemp("model"))


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> Guesses:
    return record_guesses(monkeypatch)


@pytest.mark.parametrize(("num_drafts", "chunk"), [(1, 64), (3, 64), (2, 7)])
def test_drafts_are_those_of_the_reference_and_right_as_often(
    checkpoint: Checkpoint, guesses: Guesses, num_drafts: int, chunk: int
) -> None:
    core = checkpoint.build(num_drafts, chunk, enable_prefix_caching=False)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, run(core), strict=True)]
    stats = core.stats()
    core.shutdown()
    assert texts == checkpoint.reference.texts
    for known, drafts in guesses:
        assert drafts == checkpoint.reference.drafts(known, len(drafts)), len(known)
    assert stats.num_accepted_draft_tokens == count_right(guesses, texts) > 20
    assert stats.num_draft_tokens == sum(len(drafts) for _, drafts in guesses)


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 24}, {"num_blocks": 24, "num_host_blocks": 64}], ids=str)
def test_no_text_depends_on_them(checkpoint: Checkpoint, changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    core, alone = checkpoint.build(3, record_steps=str(path), **changes), checkpoint.build(0, **changes)
    for turn, params in enumerate(({}, {}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3}, MASKED)):
        assert run(core, turn, **params) == run(alone, turn, **params)
    stats = core.stats()
    assert (stats.prefix_cache_hits > 0) or changes
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    for one in (core, alone):
        one.shutdown()
    assert verify(read_step_log(path)).num_steps == stats.step  # a thread writes the log until then


def test_a_request_goes_on_in_another_engine_core(checkpoint: Checkpoint) -> None:
    texts = []
    for num_known in (1, 9):
        core = checkpoint.build(3)
        texts.append([prompt + answer for prompt, answer in zip(PROMPTS, run(core, num_known=num_known), strict=True)])
        assert core.stats().num_accepted_draft_tokens > 20
        core.shutdown()
    assert texts == [checkpoint.reference.texts] * 2


def test_an_adapter_has_the_same_text_with_drafts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    adapter = LoRARequest(
        "a", 1, str(write_random_adapter(tmp_path / "a", Path(checkpoint.path), ["o_proj"], 1, rank=4))
    )
    drafts = {"method": checkpoint.method, "num_speculative_tokens": 2, "is_adaptive": False}
    drafts |= {"model": checkpoint.head} if checkpoint.head else {}
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    greedy, texts = Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), []
    for speculative in ({"method": "none"}, drafts):
        with LLM(checkpoint.path, enable_lora=True, speculative_config=speculative, **options) as llm:
            outputs = llm.generate(PROMPTS, greedy, use_tqdm=False, lora_request=adapter)
            texts.append(
                [prompt + list(one.outputs[0].token_ids) for prompt, one in zip(PROMPTS, outputs, strict=True)]
            )
            num_drafts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert texts[0] == texts[1] != checkpoint.reference.texts
    assert num_drafts["vllm:spec_decode_num_draft_tokens"] > 20


def test_two_ranks_have_a_part_of_the_head_each(checkpoint: Checkpoint) -> None:
    drafts = {"method": checkpoint.method, "num_speculative_tokens": 2, "is_adaptive": False}
    drafts |= {"model": checkpoint.head} if checkpoint.head else {}
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(checkpoint.path, tensor_parallel_size=2, speculative_config=drafts, **options) as llm:
        outputs = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    texts = [prompt + list(one.outputs[0].token_ids) for prompt, one in zip(PROMPTS, outputs, strict=True)]
    assert texts == checkpoint.reference.texts
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 20


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    state_engine.write_checkpoint(tmp_path, "qwen3_5")
    with pytest.raises(ValueError, match=r"missing: .*mtp\.fc\.weight"):
        Checkpoint(str(tmp_path), "", Reference.__new__(Reference)).build(1)


def test_a_family_without_one_is_refused(tmp_path: Path) -> None:
    state_engine.write_checkpoint(tmp_path, "lfm2")
    with pytest.raises(ValueError, match=r"the method 'mtp' needs a model with a layer"):
        Checkpoint(str(tmp_path), "", Reference.__new__(Reference)).build(1)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": 64}, "of a wrong shape"),
        ({"draft_vocab_size": 97}, r"of a wrong shape: lm_head\.weight"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, "states are kept after 0 to 3 layers"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"model_type": "deepseek_v3"}, "layers of 'deepseek_v3' are not supported"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_sentence(
    values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    refuse(Eagle3(), values, reason, tmp_path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": 64}, "its states have 64 numbers, and those of the served model 32"),
        ({"vocab_size": 98}, "its vocabulary has 98 tokens, and that of the served model 97"),
        ({"draft_vocab_size": 80}, "draft_vocab_size 80 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "its layers have a sliding window"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 97}}, "97 is no token of the served model"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 3], "mask_token_id": 9}}, "states are kept after 0 to 3 layers"),
        ({"block_size": 1}, "block_size 1 is the last token alone, which leaves nothing to guess"),
        ({"dflash_config": {"mask_token_id": 9}}, "target_layer_ids must be a list of numbers of layers, got None"),
    ],
)
def test_a_head_for_blocks_that_does_not_fit_is_refused_in_one_sentence(
    values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    refuse(DFlash(), values, reason, tmp_path)


def refuse(reference: Reference, values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    head = Path(reference.write(tmp_path))
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ValueError, match=f"draft head .*{reason}"):
        Checkpoint(str(tmp_path / "served"), str(head), reference).build(1)
