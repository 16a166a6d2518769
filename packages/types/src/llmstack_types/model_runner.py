"""Agreement of an engine core and its model runner before the first step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmstack_types.engine_settings import (
    AdapterSettings,
    ComputationSettings,
    KVSettings,
    LogprobSettings,
    MediaSettings,
    ParallelSettings,
    StepSettings,
    UseSettings,
    WeightSettings,
)
from llmstack_types.media import MediaSpec
from llmstack_types.vocabulary import KVGroupKind


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The nodes that share the ranks of one model; without it all ranks are processes of one machine.

    Attributes:
        launcher: `external_launcher`, where each node has a command of its own, or `ray`.
        num_nodes: Nodes, each with the same number of ranks.
        node: Number of this one; node 0 has the engine core.
        address: Where node 0 listens, as `tcp://IP:port`; empty is a free port of `interface`.
        key_file: Path of the keys that all nodes share.
        interface: Network interface that collectives between nodes may use; empty allows none.
        silence_s: A node without a sign of life for so long counts as lost.
        allow_ray_without_token: The Ray cluster may be one that asks for no token.
        num_replicas: Engine cores that share the Ray cluster.
    """

    launcher: str
    num_nodes: int
    node: int
    address: str
    key_file: str
    interface: str = ""
    silence_s: float = 5.0
    allow_ray_without_token: bool = False
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class ModelRunnerConfig(
    WeightSettings,
    UseSettings,
    MediaSettings,
    KVSettings,
    ComputationSettings,
    LogprobSettings,
    ParallelSettings,
    AdapterSettings,
    StepSettings,
):
    """Settings that load and run one model; a runner is constructed with this alone.

    Attributes:
        model_path: Folder with `config.json` and, unless `load_format` is `dummy`, safetensors weights.
        max_model_len: The longest request in tokens.
        max_num_batched_tokens: Upper bound of tokens in one step.
        max_num_drafts: Upper bound of draft tokens in one row.
        max_num_logits: Upper bound of rows and draft tokens in one step, which bounds the memory of logits; 0 where
            every row may have all of its drafts.
        draft_model_path: Folder of the model that makes draft tokens; empty where the scheduler makes them.
        draft_max_model_len: The longest request that it makes drafts for.
        draft_head: What makes drafts from hidden states: `mtp`, the layer of the checkpoint that guesses a further
            token; `eagle`, `eagle3`, `medusa` or `dflash`, heads in the folder `draft_model_path`; empty for neither.
        logits_processors: `module:Class` names of custom logits processors, in the order they are applied.
        num_engines: Engine cores on this machine that run this model; each takes its share of processors and memory.
        first_gpu: Place of the engine core's first GPU among those of the machine; its ranks use it and the next ones.
        placement: Where the ranks run; None is this machine alone.
        rank_timeout_s: How long a rank waits for another one within a step before the engine core ends.
        hf_overrides: A JSON object of values in place of those in `config.json`; empty for none.
        cuda_graph_sizes: Numbers of decoding rows for which a GPU's steps are captured; empty for the runner's own.
        enable_hybrid_kv_cache: Groups of layers have block tables of their own, so that layers with a sliding window
            free the blocks that it has passed; False keeps all blocks of all layers.
        digest_weight_content: The digest of the weights is one of their content, which hosts can compare; otherwise of
            sizes, times and headers, which takes no time.
        pack_cache: Packed weights are kept in files of the user's cache folder, and found there by later starts.
        max_loras: Upper bound of adapters in one step.
        weights_path: Folder of the weights, where they are not those of `model_path`; empty for these.
        tokenizer_path: Folder of the tokenizer, for sampling by the texts of tokens; empty for none.
    """

    model_path: str
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    logits_processors: tuple[str, ...] = ()
    max_num_drafts: int = 0
    max_num_logits: int = 0
    draft_model_path: str = ""
    draft_max_model_len: int = 0
    draft_head: str = ""
    num_engines: int = 1
    first_gpu: int = 0
    hf_overrides: str = ""
    cuda_graph_sizes: tuple[int, ...] = ()
    enable_hybrid_kv_cache: bool = True
    rank_timeout_s: float = 60.0
    digest_weight_content: bool = False
    pack_cache: bool = False
    max_loras: int = 1
    placement: RankPlacement | None = None
    tokenizer_path: str = ""
    weights_path: str = ""

    def with_weights(self, path: str) -> ModelRunnerConfig:
        """The same model with the weights of another folder; dummy weights are others too."""
        load_format = "auto" if self.load_format == "dummy" else self.load_format
        return replace(self, weights_path=path, load_format=load_format)

    @property
    def weights_folder(self) -> str:
        """The folder with the weights."""
        return self.weights_path or self.model_path

    def of_draft_model(self) -> ModelRunnerConfig:
        """The settings of the draft model: on one rank, in its own precision, without adapters and media."""
        return replace(
            self, model_path=self.draft_model_path, max_model_len=self.draft_max_model_len or self.max_model_len,
            weights_path="", draft_model_path="", draft_head="", max_num_drafts=0, hf_overrides="", quantization=None,
            enable_hybrid_kv_cache=False, enable_lora=False, enable_prompt_embeds=False, enable_mm_embeds=False,
            language_model_only=True, enable_deterministic_inference=False, tensor_parallel_size=1, placement=None,
        )  # fmt: skip

    @property
    def makes_drafts(self) -> bool:
        """Whether the runner makes draft tokens, and the scheduler says how many."""
        return bool(self.draft_model_path) or bool(self.draft_head)

    @property
    def num_ranks(self) -> int:
        """Processes that compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_local_ranks(self) -> int:
        """The number of ranks on this machine."""
        return self.num_ranks if self.placement is None else self.num_ranks // self.placement.num_nodes

    @property
    def num_processes(self) -> int:
        """Processes that compute on this machine at the same time."""
        return self.num_engines * self.num_local_ranks


_KV_BYTES_PER_STATE_BYTE = 8
"""Most bytes of keys and values for each byte of states that are kept for later requests."""

_BLOCKS_PER_STATE = 16
"""Blocks of keys and values for each state that is kept. More find no more, and large ones have half of the bytes at
most: simulated chats found 0.65 to 0.7 of their tokens with half of the bytes, and 0.47 with a ninth."""

_LIVE_STATES_PER_ROW = 2
"""State blocks of a row in a step: it reads one and writes the other."""

_STATES_PER_ROW = _LIVE_STATES_PER_ROW + 1
"""With one that is kept for later requests."""

LEAST_STATE_BLOCKS = 1 + _LIVE_STATES_PER_ROW
"""The state before the first token, and those of one row."""

_DTYPE_TO_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVTensorSpec:
    """A tensor that one layer has in the storage.

    Attributes:
        name: What it holds, such as `keys`, `values` or `latent`.
        shape: Of one block, such as [num_kv_heads, block_size, head_dim].
        dtype: The type of its numbers, such as `bfloat16`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * _DTYPE_TO_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share block tables, and have equal tensors.

    Attributes:
        layers: Their numbers in the model, ascending.
        sliding_window: How many tokens a token attends to, itself included; None for all.
        kind: What a block holds: keys and values of tokens (`full`, `window`), what both are computed from (`latent`),
            a state of all tokens before its end (`state`), or what an encoder made of one input (`content`).
        tensors: The tensors of each of its layers.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None
    kind: KVGroupKind = "full"
    tensors: tuple[KVTensorSpec, ...] = ()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers of the group."""
        return len(self.layers) * sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the KV storage of a loaded model, and facts about the model that the layers above need.

    Attributes:
        bytes_per_block: Bytes of one block of keys and values: those of the largest group, and the draft model's.
        vocab_size: Width of the logits.
        dtype: The type in which the model computes.
        kv_cache_dtype: The type of stored keys and values; empty where that is `dtype`.
        embedding_size: Width of pooled vectors; 0 where the runner does not pool.
        is_generative: False for a model without logits: it computes pooling requests only.
        is_causal: False where each token attends to the whole prompt, so that it is computed in one step.
        num_labels: The labels of the model; 0 for a model that is no classifier.
        media: What the model takes besides tokens; None for tokens only.
        bytes_per_state: Bytes of one state block, in all layers with a state; 0 for a model without states.
        groups: Groups of layers, each with its tensors; one where all layers share one block table, none without KV.
        draft_bytes_per_block: Bytes of the draft model's keys and values beside each block; 0 without one.
        draft_cost: The time of one draft of every row by the draft model, over that of a step of one token.
        weight_bytes: Bytes of weights that a step reads; 0 where the runner does not say.
    """

    num_layers: int
    block_size: int
    dtype: str
    bytes_per_block: int
    vocab_size: int
    device: str = "cpu"
    embedding_size: int = 0
    is_generative: bool = True
    is_causal: bool = True
    num_labels: int = 0
    kv_cache_dtype: str = ""
    groups: tuple[KVCacheGroupSpec, ...] = ()
    media: MediaSpec | None = None
    bytes_per_state: int = 0
    draft_bytes_per_block: int = 0
    draft_cost: float = 0.0
    weight_bytes: int = 0

    @property
    def table_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups, where they have block tables of their own; empty where all layers share one without a window.

        Groups share the storage. Lists of block ids have the id of every group for each block of tokens, group after
        group, and block 0 is the null block: it stands where a window has passed, and belongs to no request.
        """
        groups = self.kv_groups
        return groups if len(groups) > 1 or any(group.sliding_window for group in groups) else ()

    @property
    def kv_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups that keep something of each token."""
        return tuple(group for group in self.groups if group.kind != "state")

    @property
    def state_group(self) -> KVCacheGroupSpec | None:
        """The layers with a state, which have blocks of their own: one block has the state of all of them."""
        return next((group for group in self.groups if group.kind == "state"), None)

    def num_cache_bytes(self, num_blocks: int, num_state_blocks: int = 0) -> int:
        """Bytes of so many blocks of keys and values, and of so many state blocks."""
        return num_blocks * self.bytes_per_block + num_state_blocks * self.bytes_per_state

    def num_useful_states(self, num_blocks: int, max_num_rows: int) -> int:
        """State blocks that are of use beside so many blocks of keys and values; 0 for a model without states.

        One is the state before the first token, and each of `max_num_rows` rows may use two. For later requests one is
        kept for 16 blocks, which have as many bytes at most as keys and values; or an eighth of these, if that is more;
        and at least one for each row.
        """
        if not self.bytes_per_state:
            return 0
        num_bytes = num_blocks * self.bytes_per_block
        num_kept = min(num_bytes // self.bytes_per_state, num_blocks // _BLOCKS_PER_STATE)
        num_kept = max(num_kept, num_bytes // (_KV_BYTES_PER_STATE_BYTE * self.bytes_per_state))
        return 1 + _LIVE_STATES_PER_ROW * max_num_rows + max(num_kept, max_num_rows)

    def num_rows_with_states(self, num_state_blocks: int, max_num_rows: int) -> int:
        """The number of `max_num_rows` rows that so many state blocks let run; 0 if they do not suffice for one.

        Each has its two, and there is one more per row for what is kept, but where only one row can run.
        """
        if not self.bytes_per_state:
            return max_num_rows
        if num_state_blocks < LEAST_STATE_BLOCKS:
            return 0
        return min(max_num_rows, max((num_state_blocks - 1) // _STATES_PER_ROW, 1))

    def num_bytes_for_rows(self, num_rows: int, num_row_blocks: int) -> int:
        """The least bytes with which so many rows can run at once, as `split_bytes` divides them."""
        states = _STATES_PER_ROW * self.bytes_per_state
        num_even_blocks = min(num_row_blocks, -(-states // self.bytes_per_block))
        num_blocks = max(num_rows * num_even_blocks, num_row_blocks)
        return self.num_cache_bytes(num_blocks, 1 + _STATES_PER_ROW * num_rows)

    def split_bytes(self, num_bytes: int, max_num_rows: int, num_row_blocks: int) -> tuple[int, int]:
        """Blocks of keys and values and state blocks that `num_bytes` hold together.

        As many rows can run as have room for their states and for as many bytes of keys and values, or for those of
        the longest request where that needs less. What is left is shared out as in `num_useful_states`. Keys and values
        have room for one longest request, unless a single row's states do not leave it. Of a model without keys and
        values, states get all that is left.

        Args:
            num_bytes: The size of the cache.
            max_num_rows: Rows that may run at most.
            num_row_blocks: Blocks of keys and values that the longest request needs.
        """
        size, state_size = self.bytes_per_block, self.bytes_per_state
        if not state_size:
            return max(num_bytes, 0) // size, 0

        def num_row_bytes(num_rows: int) -> int:
            return self.num_bytes_for_rows(num_rows, num_row_blocks)

        num_rows = bisect_right(range(max_num_rows + 1), num_bytes, lo=1, key=num_row_bytes) - 1
        if not num_rows:
            num_state_blocks = LEAST_STATE_BLOCKS
        else:
            num_left_bytes = num_bytes - num_row_bytes(num_rows)
            if self.groups and not self.kv_groups:
                num_more = num_left_bytes // state_size
            else:
                num_more = num_left_bytes // ((1 + _KV_BYTES_PER_STATE_BYTE) * state_size)
            if num_rows == max_num_rows:
                num_kept = num_left_bytes // (state_size + max(state_size, _BLOCKS_PER_STATE * size))
                num_more = max(num_more, num_kept)
            else:
                num_more = min(num_more, _STATES_PER_ROW - 1)  # or states of another row, without its keys and values
            num_state_blocks = 1 + _STATES_PER_ROW * num_rows + num_more
        return max(num_bytes - num_state_blocks * state_size, 0) // size, num_state_blocks
