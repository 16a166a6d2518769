"""Flags of vLLM that are refused, or change nothing, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from llmstack_llm.options.foreign import ForeignFlag

_OFF = ("false", "0")
_BARE = ("", "true")

_ADAPTERS = ForeignFlag("adapters of this kind are not supported", _OFF)
_ADAPTER_TYPE = ForeignFlag("factors of adapters are stored in the type that the model computes in", ("auto", *_OFF))
_ADAPTER_KERNELS = ForeignFlag("rows of all adapters are computed together; nothing is to be chosen", (*_BARE, *_OFF))
_MEDIA = ForeignFlag("this use of images, audio and video is not supported yet", _OFF)
_FIXED_RANKS = ForeignFlag("the number of ranks is fixed at the start, by --tensor-parallel-size", _OFF)
_ONE_MACHINE = ForeignFlag("--data-parallel-size-local N runs engine cores on several machines behind one endpoint")
_EXPERTS = ForeignFlag("--enable-expert-parallel spreads experts evenly and in order; nothing else is offered", _OFF)
_KV_ELSEWHERE = ForeignFlag(
    "--kv-cache-dir DIR keeps cached prefixes on disk; --num-host-blocks N swaps preempted requests to host memory",
    _OFF,
)
_STATE_BLOCKS = ForeignFlag("states are kept at ends of blocks, whose size is --block-size", _OFF)
_STATE_TYPE = ForeignFlag(
    "states of recurrences are float32, and those of convolutions have the type of the model", ("auto", "float32")
)
_REPLAYED = ForeignFlag("states are stored, not computed again from stored inputs", ("auto", "none", *_OFF))
_OWN_CLASSES = ForeignFlag(
    "classes of the engine cannot be replaced; --middleware and --logits-processors add custom code"
)
_PLUGINS = ForeignFlag("plug-ins of vLLM are not supported")
_ALWAYS = (*_BARE, *_OFF)
_ROUNDING = ForeignFlag("only whole checkpoints are rounded, as --quantization and --kv-cache-dtype say")
_OFFLOADING = ForeignFlag("weights are not offloaded; --quantization int8 halves their size", _OFF)
_STATISTICS = ForeignFlag("there are no such statistics; /metrics lists those there are", (*_OFF, "none"))
_PLACEMENT = ForeignFlag("start the server under numactl or taskset, which hold every process of it", _OFF)
_RAY = ForeignFlag("use --distributed-executor-backend ray", _OFF, is_switch=True)
_DRAFTS = ForeignFlag("drafts follow the keys of --speculative-config alone")
_SLEEP = ForeignFlag("--enable-sleep-mode releases the weights and the KV cache as it does", (*_OFF, "cumem"))

REFUSED_FLAGS: Mapping[str, ForeignFlag] = {
    "--additional-config": _PLUGINS,
    "--allow-deprecated-quantization": ForeignFlag("no format of --quantization is deprecated", _OFF),
    "--anthropic-disabled-thinking-effort": ForeignFlag(
        "use --default-chat-template-kwargs, which reach the chat template", ("auto",)
    ),
    "--aux-output-config": ForeignFlag("answers carry tokens and log-probabilities only", _OFF),
    "--calculate-kv-scales": ForeignFlag("the scales of an fp8 KV cache are the checkpoint's, or 1", _OFF),
    "--code-revision": ForeignFlag("use --revision: a model's code is never loaded, only its files"),
    "--cohere-format": ForeignFlag("there is no route in the form of Cohere's chats", ("cmd4",)),
    "--cohere-is-reasoning-model": ForeignFlag(
        "there is no route in the form of Cohere's chats", _ALWAYS, is_switch=True
    ),
    "--cpu-distributed-timeout-seconds": ForeignFlag("use --distributed-timeout-seconds", _OFF),
    "--cpu-offload-gb": _OFFLOADING,
    "--cpu-offload-params": _OFFLOADING,
    "--cudagraph-metrics": ForeignFlag("nothing is compiled at start; /server_info lists the captured steps", _OFF),
    "--custom-histogram-buckets": _STATISTICS,
    "--data-parallel-external-lb": _ONE_MACHINE,
    "--data-parallel-hybrid-lb": _ONE_MACHINE,
    "--data-parallel-multi-port-external-lb": _ONE_MACHINE,
    "--data-parallel-rank": _ONE_MACHINE,
    "--data-parallel-supervisor-port": _ONE_MACHINE,
    "--device-ids": ForeignFlag("set CUDA_VISIBLE_DEVICES, which every program reads"),
    "--diffusion-config": ForeignFlag("diffusion models are not supported"),
    "--disable-sliding-window": ForeignFlag(
        "use --max-model-len with the length of the window, which has the same effect", _OFF
    ),
    "--dp-supervisor-probe-failure-threshold": _ONE_MACHINE,
    "--dp-supervisor-probe-interval-s": _ONE_MACHINE,
    "--dp-supervisor-probe-timeout-s": _ONE_MACHINE,
    "--ec-transfer-config": _MEDIA,
    "--elastic-ep-max-dp-size": _FIXED_RANKS,
    "--enable-elastic-ep": _FIXED_RANKS,
    "--enable-fault-tolerance": ForeignFlag("crash recovery is always on; --max-engine-restarts 0 turns it off", _OFF),
    "--enable-layerwise-nvtx-tracing": ForeignFlag("use --trace or --profiler-config", _OFF),
    "--enable-logging-iteration-details": _STATISTICS,
    "--enable-lora-bias": _ADAPTERS,
    "--enable-mamba-cache-stochastic-rounding": ForeignFlag("states are not rounded", _OFF),
    "--enable-mfu-metrics": _STATISTICS,
    "--enable-mixed-moe-lora-format": _ADAPTERS,
    "--enable-moe-shared-loras": _ADAPTERS,
    "--enable-nccl-comm-suspend": _SLEEP,
    "--enable-prompt-tokens-details": ForeignFlag("cached tokens are always reported", _ALWAYS, is_switch=True),
    "--enable-request-id-headers": ForeignFlag("answers always carry X-Request-Id", _ALWAYS, is_switch=True),
    "--enable-prompt-adapter": _ADAPTERS,
    "--enable-return-routed-experts": ForeignFlag("answers carry tokens and log-probabilities only", _OFF),
    "--enable-scale-out": ForeignFlag(
        "there are no separate routes for rendering; /tokenize renders conversations", _OFF
    ),
    "--enable-server-load-tracking": ForeignFlag("/load always counts requests", _ALWAYS, is_switch=True),
    "--enable-tower-connector-lora": _ADAPTERS,
    "--engine-use-ray": _RAY,
    "--engram-config": ForeignFlag("models with engram tables are not supported"),
    "--fail-on-environ-validation": ForeignFlag(
        "unknown variables are named in a warning, which does not end the start", _OFF
    ),
    "--fault-tolerance-config": ForeignFlag("use --max-engine-restarts, which bounds crash recovery"),
    "--fingerprint-mode": ForeignFlag("'system_fingerprint' is always made of the configuration", ("full",)),
    "--fingerprint-value": ForeignFlag("'system_fingerprint' is always made of the configuration"),
    "--fully-sharded-loras": _ADAPTER_KERNELS,
    "--grpc": ForeignFlag("this server answers HTTP alone", _OFF),
    "--grpc-port": ForeignFlag("this server answers HTTP alone", _OFF),
    "--guided-decoding-disable-any-whitespace": ForeignFlag(
        "use --structured-outputs-config.disable_any_whitespace true", _OFF, is_switch=True
    ),
    "--hf-config-path": ForeignFlag("config.json is read from the model; --hf-overrides replaces values in it"),
    "--interleave-mm-strings": _MEDIA,
    "--io-processor-plugin": _PLUGINS,
    "--kv-cache-dtype-skip-layers": _ROUNDING,
    "--kv-offloading-backend": _KV_ELSEWHERE,
    "--kv-offloading-size": _KV_ELSEWHERE,
    "--kv-sharing-fast-prefill": ForeignFlag("no supported model shares its KV cache between layers", _OFF),
    "--logging-config": ForeignFlag("use --log-config-file"),
    "--logits-processor-pattern": ForeignFlag("requests cannot name logits processors; --logits-processors loads them"),
    "--long-prefill-token-threshold-adaptive": ForeignFlag("use --long-prefill-token-threshold with a number", _OFF),
    "--long-lora-scaling-factors": _ADAPTERS,
    "--lora-dtype": _ADAPTER_TYPE,
    "--lora-target-modules": _ADAPTERS,
    "--mamba-block-size": _STATE_BLOCKS,
    "--mamba-cache-dtype": ForeignFlag(_STATE_TYPE.reason, ("auto",)),
    "--mamba-cache-philox-rounds": ForeignFlag("states are not rounded", _OFF),
    "--mamba-ssm-cache-dtype": _STATE_TYPE,
    "--max-lora-cls-labels": _ADAPTERS,
    "--max-prompt-adapter-token": _ADAPTERS,
    "--max-prompt-adapters": _ADAPTERS,
    "--max-num-active-seqs": ForeignFlag("use --max-num-seqs, which bounds the requests of a step"),
    "--max-num-scheduled-tokens": ForeignFlag("use --max-num-batched-tokens, which bounds the tokens of a step"),
    "--mm-device-do-normalize": _MEDIA,
    "--mm-encoder-attn-dtype": _ROUNDING,
    "--mm-encoder-fp8-scale-path": _ROUNDING,
    "--mm-encoder-fp8-scale-save-margin": _ROUNDING,
    "--mm-encoder-fp8-scale-save-path": _ROUNDING,
    "--mm-encoder-only": _MEDIA,
    "--model-class-overrides": _OWN_CLASSES,
    "--numa-bind": _PLACEMENT,
    "--numa-bind-cpus": _PLACEMENT,
    "--numa-bind-nodes": _PLACEMENT,
    "--offload-backend": ForeignFlag(_OFFLOADING.reason, ("auto",)),
    "--offload-group-size": ForeignFlag(_OFFLOADING.reason, ("0",)),
    "--offload-num-in-group": ForeignFlag(_OFFLOADING.reason, ("1",)),
    "--offload-params": _OFFLOADING,
    "--offload-prefetch-step": _OFFLOADING,
    "--override-attention-dtype": ForeignFlag("use --dtype, which applies to the whole model"),
    "--per-request-spec-decode-metrics": _STATISTICS,
    "--prefill-context-parallel-size": ForeignFlag(
        "a prompt is not split over ranks; --tensor-parallel-size splits the layers", ("1",)
    ),
    "--prompt-adapters": _ADAPTERS,
    "--pt-load-map-location": ForeignFlag("weights are read from safetensors, never from pickles", ("cpu",)),
    "--qlora-adapter-name-or-path": _ADAPTERS,
    "--quantization-config": _ROUNDING,
    "--quantization-param-path": ForeignFlag("the scales of an fp8 KV cache are the checkpoint's, or 1"),
    "--ray-workers-use-nsight": ForeignFlag("use --profiler-config", _OFF),
    "--reasoning-config": ForeignFlag("use --reasoning-parser, which knows the tags of its format"),
    "--reasoning-effort-map": ForeignFlag("use --default-chat-template-kwargs"),
    "--replayssm-buffer-len": _REPLAYED,
    "--return-sampling-mask": ForeignFlag("answers carry tokens and log-probabilities only", _OFF),
    "--scheduler-cls": _OWN_CLASSES,
    "--sleep-mode-backend": _SLEEP,
    "--sleep-mode-offload-cudagraph": _SLEEP,
    "--sleep-preserve-parameter-names": _SLEEP,
    "--specialize-active-lora": _ADAPTER_KERNELS,
    "--spec-decoding-acceptance-method": ForeignFlag(_DRAFTS.reason, ("rejection_sampler",)),
    "--speculative-disable-by-batch-size": _DRAFTS,
    "--speculative-draft-tensor-parallel-size": _DRAFTS,
    "--speculative-max-model-len": _DRAFTS,
    "--speculative-model-quantization": _DRAFTS,
    "--sse-keep-alive-interval": ForeignFlag("streams without news carry a comment at a fixed interval", ("0",)),
    "--tool-server": ForeignFlag("tools run on clients, not on this server"),
    "--tool-strict-level": ForeignFlag("requests say by 'strict' which functions are held to their schemas", ("auto",)),
    "--trust-request-mm-kwargs": _MEDIA,
    "--use-fp64-gumbel": ForeignFlag("tokens are drawn from float32 logits", _OFF),
    "--use-replayssm": _REPLAYED,
    "--video-pruning-method": _MEDIA,
    "--video-pruning-rate": _MEDIA,
    "--watchdog-config": ForeignFlag("use --stuck-request-timeout"),
    "--watermark-config": ForeignFlag("text is not watermarked"),
    "--weight-transfer-config": ForeignFlag("use --weight-update-dir, below which POST /update_weights takes weights"),
    "--worker-cls": _OWN_CLASSES,
    "--worker-use-ray": _RAY,
    "--worker-extension-cls": _OWN_CLASSES,
}
