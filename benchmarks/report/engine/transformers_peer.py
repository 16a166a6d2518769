"""The same shapes in transformers: eager, static cache with compilation, and continuous batching."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from report.bench import Bench
from report.engine.decode import HEADLINE, Point
from report.engine.models import fitting, model_folder
from report.engine.requests import Load, measure
from report.floors import GPT2, LLAMA_1B, LLAMA_8B, ModelShape
from report.rows import Row

LOAD = Load(64, 512, 128)
FEW, MANY = 8, 40
"""Tokens of two generations; their difference is free of prompt and set-up."""


def run_8b(bench: Bench) -> None:
    """Decode of 8B."""
    _decode(bench, LLAMA_8B)


def run_1b(bench: Bench) -> None:
    """Decode of 1B."""
    _decode(bench, LLAMA_1B)


def run_gpt2(bench: Bench) -> None:
    """Decode of GPT-2."""
    _decode(bench, GPT2)


def run_batching_8b(bench: Bench) -> None:
    """Requests of 8B, ours and theirs."""
    _batching(bench, LLAMA_8B)


def run_batching_1b(bench: Bench) -> None:
    """Requests of 1B, ours and theirs."""
    _batching(bench, LLAMA_1B)


def make_model(bench: Bench, shape: ModelShape) -> Any:
    """A model with random weights made on the device."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    with model_folder(fitting(bench, shape)) as folder, torch.device(bench.device):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    # Generations are as long as they were asked to be.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _decode(bench: Bench, shape: ModelShape) -> None:
    model = make_model(bench, shape)
    kinds: dict[str, dict[str, Any]] = {"static cache": {"cache_implementation": "static"}, "eager": {}}
    for point in bench.pick((HEADLINE, Point(8, 1024)), (HEADLINE,)):
        for label, options in kinds.items():
            title = f"transformers {shape.name} decode, {label}, {point.name}"
            if bench.has_time(10):
                found = bench.attempt(title, "ms", partial(_step, bench, model, title, point, options))
                _beside(bench, f"{shape.name} decode beside transformers' {label}, {point.name}", shape, point, found)
    torch.compiler.reset()  # what was compiled holds the weights


def _step(bench: Bench, model: Any, title: str, point: Point, options: dict[str, Any]) -> Row:
    """Milliseconds a token."""
    longest = getattr(model.config, "n_positions", point.context + MANY + 1)
    num_tokens, batch = bench.pick((min(point.context, longest - MANY - 1), point.batch), (8, 2))
    prompt = torch.randint(0, 250, (batch, num_tokens), device=bench.device)

    def generate(num_new: int) -> None:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            **options,
        )
        bench.synchronize()

    few, many = bench.pick((FEW, MANY), (1, 9))
    for _ in range(bench.pick(2, 1)):
        generate(many)  # the longer one first: it sizes the cache, and compiles
    seconds = min(_timed(generate, many) - _timed(generate, few) for _ in range(bench.pick(3, 1)))
    note = f"attention {model.config._attn_implementation}"
    return Row(title, "ms", 1e3 * seconds / (many - few), note=note)


def _timed(work: Callable[[int], None], argument: int) -> float:
    start_s = time.perf_counter()
    work(argument)
    return time.perf_counter() - start_s


def _beside(bench: Bench, title: str, shape: ModelShape, point: Point, peer: Row | None) -> None:
    """Our figure of the same run over theirs: above 100 % is a lead."""
    ours = bench.known.get(f"{shape.name} decode, {point.name}")
    if peer is None or ours is None or ours.measured is None:
        bench.row(Row(title, "ms", note="one of the two was not measured"))
    else:
        bench.row(Row(title, "ms", ours.measured, peer.measured, ours.spread, peer.note))


def _batching(bench: Bench, shape: ModelShape) -> None:
    ours = measure(bench, shape, LOAD)
    bench.check_device()
    title = f"transformers {shape.name} requests, continuous batching, {LOAD.name}"
    theirs = bench.attempt(title, "tok/s", lambda: _generate_batch(bench, shape, title))
    name = f"{shape.name} requests beside transformers' continuous batching, {LOAD.name}"
    if ours is None or theirs is None:
        bench.row(Row(name, "tok/s", note="one of the two was not measured"))
    else:
        bench.row(Row(name, "tok/s", ours.measured, theirs.measured, note=theirs.note))


def _generate_batch(bench: Bench, shape: ModelShape, title: str) -> Row:
    """Tokens per second, from the arrival of the requests; graph capture comes before."""
    from transformers import GenerationConfig

    load = bench.pick(LOAD, Load(3, 10, 4))
    model = make_model(bench, shape)
    attention: list[str] = []
    switch = model.set_attn_implementation

    def spy(name: str, *arguments: Any, **options: Any) -> Any:
        attention.append(str(name))
        return switch(name, *arguments, **options)

    model.set_attn_implementation = spy  # it switches for the run and back again
    prompts = [[(7 * place + 13 * row) % 251 for place in range(load.num_in)] for row in range(load.num_requests)]
    settings = GenerationConfig(max_new_tokens=load.num_out, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start_s = time.perf_counter()
    outputs = model.generate_batch(prompts, generation_config=settings, **(_small_cache() if bench.is_smoke else {}))
    wall_s = time.perf_counter() - start_s
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if num_tokens != load.num_requests * load.num_out:
        raise ArithmeticError(f"{num_tokens} tokens came out instead of {load.num_requests * load.num_out}")
    # Versions that do not switch by that method leave only what was asked for.
    used = next(
        (name for name in attention if name.startswith("paged|")), f"{model.config._attn_implementation}, set before"
    )
    seconds, how = _seconds(outputs.values(), wall_s)
    return Row(title, "tok/s", num_tokens / seconds, note=f"attention {used}, {seconds:.1f} s {how}")


def _small_cache() -> dict[str, Any]:
    """Without it, a smoke run would take most of the host's memory."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return {
        "warmup": False,
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
    }


def _seconds(outputs: Any, wall_s: float) -> tuple[float, str]:
    """From the first request's making to the last one's end, where transformers tells both."""
    ends = [output.lifespan[1] for output in outputs if output.lifespan[1] > 0]
    begins = [output.created_time for output in outputs]
    if len(ends) == len(begins) and 0 < max(ends) - min(begins) <= wall_s:
        return max(ends) - min(begins), "without recording"
    return wall_s, "with recording"
