"""Greedy tokens of small models with states, by the offline engine and by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_runner_helpers.merged import write_merged
from safetensors.torch import load_file, save_file

from llmstack_kernels.native.capture import CapturedCalls
from llmstack_llm import LLM, LoRARequest, SamplingParams
from llmstack_model_runner.testing import write_random_adapter

FULL = pytest.mark.full
VOCAB_SIZE, NUM_TOKENS = 97, 16
PROMPTS = [[(7 * i + 3) % VOCAB_SIZE for i in range(30 * n)] + [n + 1, 5] for n in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def cuts(*of_ranks: dict[str, Any]) -> list[Any]:
    """Options of engines that compute the prompts in chunks, by ranks as given, and in two stages."""
    others = [{"max_num_batched_tokens": 7, "max_num_seqs": 7}, *of_ranks, {"pipeline_parallel_size": 2}]
    return [{"max_num_batched_tokens": 23}, *(pytest.param(one, marks=FULL) for one in others)]


def new_model(architecture: str, config: Mapping[str, Any]) -> Any:
    """A model of transformers with random weights."""
    torch.manual_seed(3)
    model_class = getattr(transformers, architecture)
    return model_class(model_class.config_class(**config)).eval()


def save_as_published(model: Any, folder: Path, architecture: str, config: Mapping[str, Any]) -> None:
    """Writes it with a configuration of the hub, and its names of tensors, which transformers writes again."""
    model.save_pretrained(folder)
    published = {**config, "architectures": [architecture], "transformers_version": "4.57.0"}
    (folder / "config.json").write_text(json.dumps(published))


def check_own_names(checkpoint: tuple[Path, Any], folder: Path, expected: object, *, are_others: bool) -> None:
    """Tensors under the names of transformers are read, too: those of its modules, which may be others."""
    published, model = checkpoint
    (folder / "config.json").write_text((published / "config.json").read_text())
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = own.keys() ^ load_file(published / "model.safetensors").keys()
    assert bool(changed) == are_others
    save_file(own, folder / "model.safetensors")
    assert tokens_of(folder, max_num_batched_tokens=23) == expected


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


def tokens_of_transformers(model: Any) -> list[list[int]]:
    """What transformers writes for each prompt."""
    found = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS, do_sample=False,
        )  # fmt: skip
        found.append(output[0, len(prompt) :].tolist())
    return found


def check_adapter(folder: Path, tmp_path: Path, names: Sequence[str], spread: float = 0.05) -> None:
    """An adapter of layers with these names writes the tokens of its merged weights, and not those without it."""
    adapter = write_random_adapter(tmp_path / "adapter", folder, [*names], spread=spread)
    plain, merged = tmp_path / "plain", tmp_path / "merged"
    plain.mkdir()
    for file in folder.glob("*.json"):
        (plain / file.name).write_text(file.read_text())
    weights = load_file(folder / "model.safetensors")
    save_file({name.replace("backbone.", "model."): own for name, own in weights.items()}, plain / "model.safetensors")
    write_merged(merged, plain, adapter)
    wanted = tokens_of(merged)
    assert wanted != tokens_of(folder)
    for options in ({"max_num_batched_tokens": 23}, {"tensor_parallel_size": 2}):
        assert tokens_of(folder, LoRARequest("a", 1, str(adapter)), enable_lora=True, **options) == wanted


def check_captured_decodes(folder: Path, monkeypatch: Any) -> None:
    """Captured decodes have the bits of eager ones, in waves, so that rows come, go and take other states."""
    replays = []
    replay = CapturedCalls.replay
    monkeypatch.setattr(CapturedCalls, "replay", lambda calls: replays.append(len(calls)) or replay(calls))
    params = [SamplingParams(temperature=0.0, max_tokens=3 + 5 * n, ignore_eos=True, logprobs=1) for n in range(6)]
    answers = []
    for is_eager in (True, False):
        with LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", num_kv_blocks=200, max_model_len=200,
            max_num_seqs=3, enforce_eager=is_eager, speculative_config={"method": "none"},
        ) as llm:  # fmt: skip
            found = []
            for _ in range(2):
                outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
                found.append([output.outputs[0].logprobs for output in outputs])
            answers.append(found)
            assert (len(replays) > 20) == (not is_eager)
    assert answers[0] == answers[1]
