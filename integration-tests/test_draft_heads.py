"""Drafts by a layer of the checkpoint: those of a reference in PyTorch, right as often, and no text depends on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import state_engine
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_llm import LLM
from llmstack_llm import SamplingParams as Sampling
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

by_head = pytest.importorskip("llmstack_model_runner.drafts.by_head")

NUM_TOKENS = 24
PROMPTS = [[(7 * i + 3 * n) % 97 for i in range(5 + 9 * n)] for n in range(4)]
QWEN = state_engine.QWEN3_5 | {"initializer_range": 0.2}
NEXT = QWEN | {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "initializer_range": 0.3,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OF_QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
BEHIND = "model.layers.3."
OF_DEEPSEEK = (BEHIND, f"{BEHIND}enorm", f"{BEHIND}hnorm", f"{BEHIND}eh_proj", f"{BEHIND}shared_head.norm")
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "Qwen3_5": ("Qwen3_5TextConfig", QWEN, ONE_LAYER, OF_QWEN),
    "Qwen3Next": ("Qwen3NextConfig", NEXT, ONE_LAYER, OF_QWEN),
    "DeepseekV3": (
        "DeepseekV3Config", DEEPSEEK, {"num_hidden_layers": 1, "first_k_dense_replace": 0}, OF_DEEPSEEK,
    ),
}  # fmt: skip


class Reference(torch.nn.Module):
    """A model of transformers, and the head: a model of one layer behind two norms and a joint."""

    def __init__(self, family: str) -> None:
        super().__init__()
        config_class, values, changes, _ = FAMILIES[family]
        make = getattr(transformers, f"{family}ForCausalLM")
        torch.manual_seed(1)
        self.model = make(getattr(transformers, config_class)(**values)).eval()
        self.head = make(getattr(transformers, config_class)(**values | changes)).eval()
        size = values["hidden_size"]
        self.norms = torch.nn.ModuleList(type(self.model.model.norm)(size, 1e-6) for _ in range(2))
        self.join = torch.nn.Linear(2 * size, size, bias=False)

    def joined(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(token_ids)
        return self.join(torch.cat([self.norms[0](embedded), self.norms[1](hidden)], dim=-1))

    def outputs(self, joined: torch.Tensor) -> torch.Tensor:
        return self.head.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]

    def answer(self, prompt: list[int]) -> list[int]:
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        given = torch.tensor([prompt])
        output = self.model.generate(given, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
        return output[0].tolist()

    def train_head(self, texts: list[list[int]]) -> None:
        """Lets it guess these texts, so that there is something to accept."""
        parameters = [*self.head.model.layers.parameters(), *self.norms.parameters(), *self.join.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=5e-3)
        self.texts = [(text, self.hidden(text)) for text in texts]
        for _ in range(40):
            optimizer.zero_grad()
            for text, hidden in self.texts:
                outputs = self.outputs(self.joined(torch.tensor(text[1:-1]), hidden[:-2]))
                logits = self.model.lm_head(outputs)
                torch.nn.functional.cross_entropy(logits, torch.tensor(text[2:])).backward()
            optimizer.step()

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        """The guesses behind the known tokens, of which the model has not seen the last one."""
        hidden = next(hidden for text, hidden in self.texts if text[: len(known)] == known)
        joined = self.joined(torch.tensor(known[1:]), hidden[: len(known) - 1])
        found: list[int] = []
        while True:
            last = self.outputs(joined)[-1:]
            found.append(int(self.model.lm_head(last).argmax()))
            if len(found) == count:
                return found
            joined = torch.cat([joined, self.joined(torch.tensor(found[-1:]), last)])


class Checkpoint(NamedTuple):
    path: str
    reference: Reference
    texts: list[list[int]]


def write(folder: Path, reference: Reference, names: tuple[str, ...]) -> None:
    layer, token_norm, hidden_norm, join, norm = names
    reference.model.save_pretrained(folder)
    reference.head.save_pretrained(folder / "head")
    tensors, own = load_file(folder / "model.safetensors"), load_file(folder / "head" / "model.safetensors")
    prefix = "model.layers.0."
    tensors |= {layer + name.removeprefix(prefix): own[name] for name in own if name.startswith(prefix)}
    tensors[f"{norm}.weight"] = own["model.norm.weight"]
    for name, part in ((token_norm, reference.norms[0]), (hidden_norm, reference.norms[1]), (join, reference.join)):
        tensors[f"{name}.weight"] = part.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["Qwen3_5", "DeepseekV3", pytest.param("Qwen3Next", marks=pytest.mark.full)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    reference = Reference(request.param)
    texts = [reference.answer(prompt) for prompt in PROMPTS]
    reference.train_head(texts)
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, reference, FAMILIES[request.param][3])
    return Checkpoint(str(folder), reference, texts)


def build(path: str, num_drafts: int, max_num_batched_tokens: int = 64, **changes: Any) -> EngineCore:
    limits = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": max_num_batched_tokens}
    speculative = SpeculativeConfig("mtp", num_drafts) if num_drafts else None
    model = ModelRunnerConfig(
        path, dtype="float32", device="cpu", block_size=8, max_num_drafts=num_drafts, use_draft_head=num_drafts > 0,
        **limits,
    )  # fmt: skip
    scheduler = SchedulerConfig(speculative=speculative, **limits)
    return build_engine_core(EngineConfig(model, scheduler=scheduler, **{"num_blocks": 200} | changes))


def run(core: EngineCore, turn: int = 0, **params: Any) -> list[list[int]]:
    answers: dict[str, list[int]] = {f"{turn} {number}": [] for number in range(len(PROMPTS))}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params})
    for name, prompt in zip(answers, PROMPTS, strict=True):
        core.add_request(EngineCoreRequest(name, prompt, sampling))
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.new_token_ids
    return list(answers.values())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The drafts of all rows, each behind the tokens that were known."""
    found: list[tuple[list[int], list[int]]] = []
    make: Callable[..., Any] = by_head.DraftsByHead.make

    def record(self: Any, rows: Any, wanted: Any) -> Any:
        batch, drafts = self._rows.batch, make(self, rows, wanted)
        for row, own in zip(rows.tolist(), drafts.tolist(), strict=True):
            known = batch.token_ids[row, : batch.num_tokens[row]].tolist()
            found.append((known, [token_id for token_id in own if token_id >= 0]))
        return drafts

    monkeypatch.setattr(by_head.DraftsByHead, "make", record)
    return found


@pytest.mark.parametrize(("num_drafts", "chunk"), [(1, 64), (3, 64), (2, 7)])
def test_drafts_are_those_of_the_reference_and_right_as_often(
    checkpoint: Checkpoint, made: list[tuple[list[int], list[int]]], num_drafts: int, chunk: int
) -> None:
    core = build(checkpoint.path, num_drafts, chunk, enable_prefix_caching=False)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, run(core), strict=True)]
    stats = core.stats()
    core.shutdown()
    assert texts == checkpoint.texts
    num_right = 0
    for known, drafts in made:
        assert drafts == checkpoint.reference.drafts(known, len(drafts)), len(known)
        text = next(text for text in texts if text[: len(known)] == known)
        is_right = np.array(drafts) == np.array(text[len(known) :][: len(drafts)])
        num_right += int(np.cumprod(is_right).sum())
    assert stats.num_accepted_draft_tokens == num_right > 20
    assert stats.num_draft_tokens == sum(len(drafts) for _, drafts in made)


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 24}, {"num_blocks": 24, "num_host_blocks": 64}], ids=str)
def test_no_text_depends_on_them(checkpoint: Checkpoint, changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    core, alone = build(checkpoint.path, 3, record_steps=str(path), **changes), build(checkpoint.path, 0, **changes)
    for turn, params in enumerate(({}, {}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3})):
        assert run(core, turn, **params) == run(alone, turn, **params)
    stats = core.stats()
    assert (stats.prefix_cache_hits > 0) or changes
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert verify(read_step_log(path)).num_steps == stats.step
    for one in (core, alone):
        one.shutdown()


def test_two_ranks_have_a_part_of_the_head_each(checkpoint: Checkpoint) -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "is_adaptive": False}
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(checkpoint.path, tensor_parallel_size=2, speculative_config=drafts, **options) as llm:
        outputs = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    texts = [prompt + list(one.outputs[0].token_ids) for prompt, one in zip(PROMPTS, outputs, strict=True)]
    assert texts == checkpoint.texts
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 20


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    state_engine.write_checkpoint(tmp_path, "qwen3_5")
    with pytest.raises(ValueError, match=r"missing: .*mtp\.fc\.weight"):
        build(str(tmp_path), 1)


def test_a_family_without_one_is_refused(tmp_path: Path) -> None:
    state_engine.write_checkpoint(tmp_path, "lfm2")
    with pytest.raises(ValueError, match=r"the method 'mtp' needs a model with a layer"):
        build(str(tmp_path), 1)
