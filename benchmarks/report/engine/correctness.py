"""Compares models with and without CUDA graphs, and with transformers in float32."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmstack_types import NewRequest, SamplingParams, ScheduledRequest, SchedulerOutput
from report.bench import Bench
from report.engine.models import BLOCK_SIZE, fitting, start_model, started
from report.engine.requests import Load, core_over, serve
from report.floors import GPT2, LLAMA_1B, ModelShape
from report.rows import Row

LOAD = Load(13, 300, 40)
NUM_LAYERS = 2
NUM_PROMPTS, PROMPT_LENGTH = 8, 200


def run(bench: Bench) -> None:
    """GPT-2's shape and Llama's, with few layers."""
    for shape in (LLAMA_1B, GPT2):
        few = replace(fitting(bench, shape), num_layers=bench.pick(NUM_LAYERS, 2))
        title = f"{shape.name} tokens that differ without graphs and run-ahead"
        bench.attempt(title, "differing", partial(_engines, bench, few, title))
        title = f"{shape.name} log-probabilities, largest difference from transformers in float32"
        bench.attempt(title, "nat", partial(_transformers, bench, few, title))


def _engines(bench: Bench, shape: ModelShape, title: str) -> Row:
    """Outputs of requests of several lengths, greedy and drawn, by the quickest way and by the plainest."""
    quick = _outputs(bench, shape, is_ahead=True, enforce_eager=False)
    plain = _outputs(bench, shape, is_ahead=False, enforce_eager=True)
    pairs = [pair for name in quick for pair in zip(quick[name], plain[name], strict=True)]
    num_distinct = len({token for tokens in plain.values() for token in tokens})
    note = f"of {len(pairs)}, {num_distinct} distinct ones"
    return Row(title, "differing", float(sum(one != other for one, other in pairs)), note=note)


def _outputs(bench: Bench, shape: ModelShape, *, is_ahead: bool, enforce_eager: bool) -> dict[str, list[int]]:
    load = bench.pick(LOAD, Load(3, 20, 6))
    room = load.num_requests * (load.num_in + load.num_out + 2 * BLOCK_SIZE)
    options = {"max_model_len": load.num_in + load.num_out + BLOCK_SIZE, "enforce_eager": enforce_eager}
    with started(bench, shape, room, **options) as runner:
        core = core_over(bench, runner, options["max_model_len"], load.num_requests, is_ahead=is_ahead)
        return serve(bench, core, load, "request", is_varied=True)[1]


def _transformers(bench: Bench, shape: ModelShape, title: str) -> Row:
    """The same weights in both: what a prompt's last token is followed by."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from report.engine.models import model_folder

    num_prompts, length = bench.pick((NUM_PROMPTS, PROMPT_LENGTH), (2, 20))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 250, (num_prompts, length), generator=generator)
    with model_folder(shape) as folder, tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        for weight in model.parameters():
            # Rounded beforehand: the difference is then of computing, not of storing. Spread out: the text varies.
            weight.copy_((weight * (3 if weight.ndim > 1 else 1)).bfloat16())
        model.save_pretrained(name)
        expected = model.to(bench.device)(prompts.to(bench.device)).logits[:, -1].float().log_softmax(-1)
        del model
        tokens, logprobs = _next_tokens(bench, Path(name), prompts.tolist())
    theirs = expected.cpu().gather(1, torch.tensor(tokens)[:, None])[:, 0]
    difference = float((torch.tensor(logprobs) - theirs).abs().max())
    num_equal = int((torch.tensor(tokens) == expected.cpu().argmax(-1)).sum())
    return Row(title, "nat", difference, note=f"{num_equal} of {num_prompts} most likely tokens are the same")


def _next_tokens(bench: Bench, folder: Path, prompts: list[list[int]]) -> tuple[list[int], list[float]]:
    """The greedy token after each prompt, and its log-probability, all prompts in one step."""
    length = len(prompts[0])
    row_blocks = -(-(length + 1) // BLOCK_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
    requests = [NewRequest(str(row), list(prompt), length, params) for row, prompt in enumerate(prompts)]
    rows = [
        ScheduledRequest(str(row), 0, length, list(range(row * row_blocks, (row + 1) * row_blocks)))
        for row in range(len(prompts))
    ]
    fields: dict[str, Any] = {"load_format": "auto", "max_model_len": length + BLOCK_SIZE}
    with start_model(bench, folder, len(prompts) * row_blocks * BLOCK_SIZE, **fields) as runner:
        step = SchedulerOutput(1, requests, rows, [], length * len(prompts))
        output = runner.runner.execute_model(step).result()
    tokens = [output.sampled_token_ids[row][0] for row in range(len(prompts))]
    return tokens, [output.logprobs[str(row)][0].logprobs[0] for row in range(len(prompts))]
