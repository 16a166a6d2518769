"""What an engine core and its model runner agree on before the first step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelRunnerConfig:
    """How to load and run one model; a runner is constructed with this alone.

    Attributes:
        model_path: Folder with `config.json` and, unless `load_format` is `dummy`, safetensors weights.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        load_format: `auto` and `safetensors` read weights; `dummy` makes them from `seed`.
        max_model_len: The longest request in tokens.
        max_num_batched_tokens: Upper bound of tokens in one step.
        max_num_seqs: Upper bound of rows in one step.
        device: `auto`, `cpu` or `cuda`.
        gpu_memory_utilization: Share of a GPU's memory that the process may use.
    """

    model_path: str
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int = 2048
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    device: str = "auto"
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the KV storage of a loaded model, and facts about the model that the layers above need.

    Attributes:
        bytes_per_block: Keys and values of all layers for one block.
        vocab_size: Width of the logits.
        dtype: What the model computes in.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    bytes_per_block: int
    vocab_size: int
    device: str = "cpu"
