"""Test kit: small checkpoints, and a driver that replaces the scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from llmstack_model_files import read_adapter, read_json
from llmstack_model_runner.adapters.config import read_adapter_config
from llmstack_model_runner.layers.adaptation import AdaptedLayers, adapted
from llmstack_model_runner.layers.weight_slot import WeightKind
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import load_model_class
from llmstack_types import (
    EncoderWork,
    LoRAIdentity,
    MediaItem,
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)


def write_gpt2_config(folder: Path, **overrides: object) -> Path:
    """Writes the config.json of a tiny GPT-2, for `load_format` dummy; returns the folder."""
    config: dict[str, object] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 128,
        "vocab_size": 97,
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_gpt2_checkpoint(folder: Path, seed: int = 0, spread: float = 0.5, **overrides: object) -> Path:
    """Writes a tiny GPT-2 with random weights, large enough that greedy outputs vary; returns the folder."""
    write_gpt2_config(folder, **overrides)
    return write_random_weights(folder, seed, spread)


def write_random_weights(folder: Path, seed: int = 0, spread: float = 0.5) -> Path:
    """Writes random weights beside a config.json of any architecture; returns the folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_class = load_model_class(config["architectures"][0])
    slots = model_class(config, torch.float32, torch.device("cpu")).slots()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, slot in slots.items():
        # Large biases would dominate the products.
        values = torch.randn(slot.shape, generator=generator) * (spread if len(slot.shape) > 1 else 0.02)
        weights[name] = values + 1 if slot.kind is WeightKind.SCALE else values
    save_file(weights, folder / "model.safetensors")
    return folder


def write_random_adapter(
    folder: Path,
    model_folder: Path,
    targets: Sequence[str],
    seed: int = 0,
    rank: int = 4,
    spread: float = 0.3,
    **overrides: object,
) -> Path:
    """Writes an adapter with random factors, as peft does, for the modules with these names; returns the folder.

    `overrides` are fields of its configuration; `target_parameters` are written too.
    """
    config = read_json(model_folder, "config.json")
    model_class = load_model_class(config["architectures"][0])
    layers = AdaptedLayers()
    with adapted(layers):
        model_class(config, torch.float32, torch.device("cpu"))
    values: dict[str, object] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    values |= {"target_modules": list(targets), "base_model_name_or_path": str(model_folder), **overrides}
    adapter_config = read_adapter_config(values)
    rank_of = adapter_config.rank_of
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in layers.parts.items():
        if f".{name}".endswith(tuple(f".{target}" for target in targets)):
            for factor, shape in (("A", (rank_of(name), part.in_features)), ("B", (part.out_features, rank_of(name)))):
                values_of = torch.randn(shape, generator=generator) * spread
                end = f"lora_embedding_{factor}" if part.is_embedding else f"lora_{factor}.weight"
                tensors[f"base_model.model.{name}.{end}"] = values_of
    for name, stacks in layers.stacks.items():
        for depth, parameter in enumerate(
            reversed([one for one in stacks if adapter_config.is_parameter(f"{name}.{one}")])
        ):
            part, ranks = stacks[parameter][0], len(stacks[parameter]) * rank_of(f"{name}.{parameter}")
            for factor, shape in (("A", (ranks, part.in_features)), ("B", (part.out_features, ranks))):
                module = name + depth * ".base_layer"
                values_of = torch.randn(shape, generator=generator) * spread
                tensors[f"base_model.model.{module}.lora_{factor}.weight"] = values_of
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def identity_of(folder: Path, name: str = "adapter", generation: int = 1) -> str:
    """The identity that requests name an adapter by."""
    return str(LoRAIdentity(name, read_adapter(folder, 1 << 30).digest, generation))


class StepDriver:
    """Drives a runner without a scheduler; the caller chooses the number of tokens of each request in each step."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        """Drives an initialized runner; blocks are allocated in order and freed on removal.

        Blocks that sliding windows have passed are kept: only a scheduler frees them. A request of a model with states
        has two state blocks in turns, those from `2 * n + 1` on for the n-th request, and shares none.
        """
        self.outputs: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self._runner = runner
        spec = runner.kv_cache_spec()
        self._block_size = spec.block_size
        self._num_groups = max(1, len(spec.table_groups))  # block ids of the groups alternate
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._new: list[NewRequest] = []
        self._removed: list[str] = []
        self._requests: dict[str, NewRequest] = {}
        self._blocks: dict[str, list[int]] = {}
        self._num_sent_blocks: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        self._num_steps = 0
        self._has_states = spec.state_group is not None
        self._state_blocks: dict[str, tuple[int, int]] = {}  # of each request: its state, and the other one

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        eos: tuple[int, ...] = (),
        lora_name: str | None = None,
        media: tuple[tuple[int, MediaItem], ...] = (),
    ) -> None:
        """Adds a request to the next step; `media` are its items with their numbers."""
        self.outputs[request_id] = []
        request = NewRequest(request_id, list(prompt), len(prompt), params, eos, lora_name, media=media)
        self._requests[request_id] = request
        self._start(request_id)

    def remove(self, request_id: str) -> None:
        """Ends a request before the next step."""
        blocks = self._blocks.pop(request_id)
        self._free_blocks.extend(set(blocks).difference(*self._blocks.values()))
        waiting = [request for request in self._new if request.request_id != request_id]
        if len(waiting) == len(self._new):
            self._removed.append(request_id)
        self._new = waiting

    def preempt(self, request_id: str) -> None:
        """Frees a request's blocks and restarts it with prompt and output, as a scheduler resumes it."""
        self.remove(request_id)
        self._start(request_id)

    def share(self, request_id: str, other_id: str) -> int:
        """Makes a prefix hit: a request that has computed nothing shares the full blocks of the common prefix.

        Returns the number of tokens that need not be computed; the last one is always computed.
        """
        if self._blocks[request_id]:
            raise ValueError(f"request {request_id} has blocks already")
        if self._has_states:
            return 0
        tokens = self._token_ids(request_id)[:-1]
        computed = self._token_ids(other_id)[: self._num_computed[other_id]]
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, computed, strict=False)))
        num_blocks = num_equal // self._block_size
        self._blocks[request_id] = self._blocks[other_id][: num_blocks * self._num_groups]
        self._num_computed[request_id] = num_blocks * self._block_size
        return self._num_computed[request_id]

    def num_left(self, request_id: str) -> int:
        """Number of known tokens without KV; 1 for a request that decodes."""
        request = self._requests[request_id]
        return request.num_prompt_tokens + len(self.outputs[request_id]) - self._num_computed[request_id]

    def step(
        self,
        request_id_to_num_tokens: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]] = MappingProxyType({}),
        encoder_work: Sequence[EncoderWork] = (),
        freed_media: Sequence[int] = (),
    ) -> ModelRunnerOutput:
        """Runs one step with the given rows, in the mapping's order; `drafts` follow the tokens of their rows."""
        scheduled = [
            self._schedule(request_id, num, drafts.get(request_id, ()))
            for request_id, num in request_id_to_num_tokens.items()
        ]
        states = [self._next_states(row) for row in scheduled] if self._has_states else []
        output = self._runner.execute_model(
            SchedulerOutput(
                step=self._num_steps,
                new_requests=self._new,
                scheduled_requests=scheduled,
                removed_request_ids=self._removed,
                total_num_scheduled_tokens=sum(row.num_scheduled_tokens for row in scheduled),
                states=states,
                encoder_work=list(encoder_work),
                freed_media=list(freed_media),
            )
        ).result()
        self._new, self._removed = [], []
        self._num_steps += 1
        for request_id, token_ids in zip(output.request_ids, output.sampled_token_ids, strict=True):
            self.outputs[request_id].extend(token_ids)
            # Accepted tokens are computed; slots of other drafts are reused.
            self._num_computed[request_id] += max(len(token_ids) - 1, 0)
        self.errors.update(output.errors)
        return output

    def run(self, num_output_tokens: int) -> dict[str, list[int]]:
        """Steps all requests, whole prompts first, for that many output tokens each; returns all outputs."""
        for _ in range(num_output_tokens):
            self.step({request_id: self.num_left(request_id) for request_id in self._blocks})
        return self.outputs

    def _start(self, request_id: str) -> None:
        request = self._requests[request_id]
        token_ids = self._token_ids(request_id)
        self._blocks[request_id] = []
        self._num_computed[request_id] = self._num_sent_blocks[request_id] = 0
        self._new.append(replace(request, token_ids=token_ids))

    def _schedule(self, request_id: str, num_tokens: int, drafts: Sequence[int]) -> ScheduledRequest:
        start = self._num_computed[request_id]
        blocks = self._blocks[request_id]
        num_blocks = -(-(start + num_tokens + len(drafts)) // self._block_size) * self._num_groups
        num_new_blocks = max(num_blocks - len(blocks), 0)
        blocks.extend(self._free_blocks.pop() for _ in range(num_new_blocks))
        num_sent, self._num_sent_blocks[request_id] = self._num_sent_blocks[request_id], len(blocks)
        self._num_computed[request_id] = start + num_tokens
        return ScheduledRequest(request_id, start, num_tokens + len(drafts), blocks[num_sent:], drafts)

    def _next_states(self, row: ScheduledRequest) -> tuple[int, int]:
        """The state blocks that a row reads and writes."""
        first = 2 * len(self._state_blocks) + 1
        block, other = self._state_blocks.get(row.request_id, (first, first + 1))
        self._state_blocks[row.request_id] = other, block
        return (block if row.num_computed_tokens else 0), other

    def _token_ids(self, request_id: str) -> list[int]:
        request = self._requests[request_id]
        return request.token_ids[: request.num_prompt_tokens] + self.outputs[request_id]
