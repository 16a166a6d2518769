"""Flags of vLLM without effect: they tune what this engine chooses itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmstack_llm.options.foreign import ForeignFlag

# None of these changes tokens, log-probabilities, limits or security; what would is refused.
_REASON_TO_FLAGS: Mapping[str, Sequence[str]] = {
    "attention kernels are chosen for the machine and the model": (
        "--attention-backend", "--attention-config", "--dcp-comm-backend", "--dcp-q-replicate",
        "--disable-cascade-attn", "--gdn-prefill-backend", "--kda-decode-backend", "--kda-prefill-backend",
        "--mamba-backend", "--mamba-ssu-algorithm", "--sparse-indexer-topk-backend",
    ),
    "kernels of linear layers and experts are chosen for the machine and the types of the weights": (
        "--ir-op-priority", "--kernel-config", "--linear-backend", "--moe-backend", "--monokernel",
    ),
    "kernels are tuned when they are built, or during the warm-up": ("--enable-flashinfer-autotune",),
    "nothing is compiled at start, and decode steps are captured as --enforce-eager and "
    "--cudagraph-capture-sizes say": (
        "--compilation-config", "--full-cuda-graph", "--jit-monitor-mode", "--jit-monitor-verbose",
        "--max-cudagraph-capture-size", "--optimization-level",
    ),
    "the scheduler and the kernels have one mode for throughput and latency": ("--performance-mode",),
    "how ranks exchange their results is chosen for the devices": (
        "--all2all-backend", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold",
        "--disable-custom-all-reduce", "--disable-nccl-for-dp-synchronization", "--dp-sync-interval",
        "--enable-batch-sharded-sampling", "--enable-dbo", "--enable-hc-sp", "--enable-microbatching",
        "--enable-shm-tensor-arena", "--moe-all2all-backend", "--ubatch-size",
    ),
    "experts are spread evenly and in order": (
        "--enable-ep-weight-filter", "--enable-eplb", "--eplb-config", "--eplb-log-balancedness",
        "--eplb-step-interval", "--eplb-window-size", "--expert-placement-strategy", "--num-redundant-experts",
    ),
    "a rank keeps the KV cache of its heads for all tokens": (
        "--cp-kv-cache-interleave-size", "--dcp-kv-cache-interleave-size", "--decode-context-parallel-size",
    ),
    "weights are memory-mapped from safetensors, and only the needed files are downloaded": (
        "--ignore-patterns", "--max-parallel-loading-workers", "--model-loader-extra-config",
        "--safetensors-load-strategy", "--safetensors-prefetch-block-size", "--safetensors-prefetch-num-threads",
    ),
    "the log reports the stages of the start and unexpected errors with their stack": (
        "--log-error-stack", "--use-tqdm-on-load",
    ),
    "the log of outputs shows each output as a whole": ("--enable-log-deltas",),
    "the log has one line of statistics for all engine cores": ("--aggregate-engine-logging",),
    "prefixes are compared token by token, without hashes": ("--prefix-caching-hash-algo",),
    "which blocks are kept for later prefixes is chosen by their last use": (
        "--enable-mamba-shared-prefix-checkpoint", "--mamba-cache-mode", "--prefix-cache-retention-interval",
        "--prefix-match-unit", "--swa-bounded-replay",
    ),
    "a request is admitted when the free blocks suffice for its whole prompt, and preemption makes room later": (
        "--scheduler-reserve-full-isl", "--watermark",
    ),
    "prompts are computed beside the running streams in every step": (
        "--prefill-schedule-interval", "--scheduler-delay-factor",
    ),
    "--max-num-partial-prefills bounds partly computed prompts of any length": ("--max-long-partial-prefills",),
    "memory is allocated by torch": ("--enable-cumem-allocator",),
    "conversations are rendered in the API processes, whose number is --api-server-count": (
        "--renderer-num-workers", "--tokenizer-pool-extra-config", "--tokenizer-pool-size", "--tokenizer-pool-type",
    ),
    "captured steps work for any length": ("--max-context-len-to-capture", "--max-seq-len-to-capture"),
    "every step is scheduled; --stream-interval makes chunks larger": (
        "--multi-step-stream-outputs", "--num-scheduler-steps",
    ),
    "KV blocks have one manager, and drafts get the blocks that they need": (
        "--num-lookahead-slots", "--use-v2-block-manager",
    ),
    "preempted requests are computed again, or swapped to --num-host-blocks": ("--preemption-mode",),
    "the results of a step are always read beside the next one": ("--disable-async-output-proc",),
    "reasoning is found where there is a --reasoning-parser": ("--enable-reasoning",),
    "constraints have one compiler": ("--guided-decoding-disable-fallback",),
    "log-probabilities are computed for every token that asks for them": ("--disable-logprobs-during-spec-decoding",),
    "adapters with tokens of their own are refused when they are loaded": ("--lora-extra-vocab-size",),
    "no metrics are hidden": ("--show-hidden-metrics-for-version",),
    "late interaction is not offered": ("--enable-flash-late-interaction",),
    "/docs needs no network in any case": ("--enable-offline-docs",),
    "pictures are decoded once, kept by their content, and read by the engine core where they are": (
        "--disable-chunked-mm-input", "--disable-mm-preprocessor-cache", "--ec-manager-config",
        "--enable-multimodal-encoder-data-parallel", "--mm-cache-preprocessor",
        "--mm-encoder-attn-backend", "--mm-encoder-tp-mode", "--mm-hasher-algorithm", "--mm-ipc-gpu-memory-gb",
        "--mm-processor-cache-type", "--mm-processor-device",
        "--mm-shm-cache-max-object-size-mb", "--mm-tensor-ipc", "--skip-mm-profiling",
    ),
}  # fmt: skip
# Of older versions, whose list of forms is not kept.
_OLDER_SWITCHES = (
    "--disable-async-output-proc", "--disable-logprobs-during-spec-decoding", "--enable-microbatching",
    "--enable-multimodal-encoder-data-parallel", "--enable-reasoning", "--eplb-log-balancedness", "--full-cuda-graph",
    "--guided-decoding-disable-fallback", "--mm-cache-preprocessor", "--use-v2-block-manager",
)  # fmt: skip
_REFUSED_KEYS: Mapping[str, tuple[str, ...]] = {
    "--attention-config": ("indexer_kv_dtype", "indexer_sparse_logits", "use_non_causal",
                           "use_prefill_query_quantization"),
}  # fmt: skip

ACCEPTED_FLAGS: Mapping[str, ForeignFlag] = {
    name: ForeignFlag(
        reason,
        is_accepted=True,
        is_json=name in _REFUSED_KEYS,
        refused_keys=_REFUSED_KEYS.get(name, ()),
        is_switch=name in _OLDER_SWITCHES,
    )
    for reason, names in _REASON_TO_FLAGS.items()
    for name in names
}
