"""Flags of vLLM that are refused, each with the reason and the alternative."""

from __future__ import annotations

from collections.abc import Mapping

from llmstack_llm.options.foreign import ForeignFlag

_OFF = ("false", "0")
_BARE = ("", "true")

_ADAPTERS = ForeignFlag("LoRA adapters are not supported yet", _OFF)
_MEDIA = ForeignFlag("images, audio and video are not supported yet", _OFF)
_SEVERAL_DEVICES = ForeignFlag(
    "an engine core runs on one device; --data-parallel-size N runs several engine cores side by side", _OFF
)
_ONE_MACHINE = ForeignFlag("all engine cores run on this machine; put a load balancer in front of several servers")
_EXPERTS = ForeignFlag("experts are not distributed: an engine core runs on one device", _OFF)
_NO_SUCH_THING = ForeignFlag("this server has no such feature to disable", (*_BARE, *_OFF))
_KV_ELSEWHERE = ForeignFlag(
    "the KV cache stays in the engine core; --num-host-blocks N swaps preempted requests to host memory", _OFF
)
_COMPILATION = ForeignFlag("nothing is compiled at start; --enforce-eager turns captured steps off")
_KERNELS = ForeignFlag("kernels are chosen for the machine; /server_info lists them under engine.backends", ("auto",))
_STATE_SPACE = ForeignFlag("state space models are not supported")
_NO_REPOSITORY_CODE = ForeignFlag(
    "code from model repositories is never executed; --model-impl transformers runs every architecture of "
    "transformers, and installed packages may add more",
    _OFF,
)
_OWN_CLASSES = ForeignFlag(
    "classes of the engine cannot be replaced; --middleware and --logits-processors add custom code"
)
_PLUGINS = ForeignFlag("plug-ins of vLLM are not supported")
_ALWAYS = (*_BARE, *_OFF)
_WEIGHT_FILES = ForeignFlag("weights are always memory-mapped from safetensors", ("auto", "lazy", *_OFF))

FOREIGN_FLAGS: Mapping[str, ForeignFlag] = {
    "--additional-config": _PLUGINS,
    "--all2all-backend": _EXPERTS,
    "--allow-deprecated-quantization": ForeignFlag("no format of --quantization is deprecated", _OFF),
    "--allowed-local-media-path": _MEDIA,
    "--allowed-media-domains": _MEDIA,
    "--attention-backend": _KERNELS,
    "--attention-config": _KERNELS,
    "--calculate-kv-scales": ForeignFlag("the scales of an fp8 KV cache are the checkpoint's, or 1", _OFF),
    "--code-revision": _NO_REPOSITORY_CODE,
    "--compilation-config": _COMPILATION,
    "--config-format": ForeignFlag("the configuration is always read from config.json", ("auto", "hf")),
    "--cpu-offload-gb": ForeignFlag("weights are not offloaded; --quantization int8 halves their size", _OFF),
    "--cudagraph-metrics": _COMPILATION,
    "--data-parallel-address": _ONE_MACHINE,
    "--data-parallel-backend": ForeignFlag("engine cores are always processes", ("mp",)),
    "--data-parallel-external-lb": _ONE_MACHINE,
    "--data-parallel-hybrid-lb": _ONE_MACHINE,
    "--data-parallel-rank": _ONE_MACHINE,
    "--data-parallel-rpc-port": _ONE_MACHINE,
    "--data-parallel-size-local": _ONE_MACHINE,
    "--data-parallel-start-rank": _ONE_MACHINE,
    "--default-mm-loras": _ADAPTERS,
    "--device": ForeignFlag("the device is a GPU if there is one, else the CPU", ("auto",)),
    "--disable-cascade-attn": _NO_SUCH_THING,
    "--disable-custom-all-reduce": _NO_SUCH_THING,
    "--disable-mm-preprocessor-cache": _NO_SUCH_THING,
    "--disable-sliding-window": ForeignFlag(
        "use --max-model-len with the length of the window, which has the same effect", _OFF
    ),
    "--distributed-executor-backend": ForeignFlag("an engine core runs on one device in one process", ("mp", "uni")),
    "--distributed-timeout-seconds": _SEVERAL_DEVICES,
    "--ec-transfer-config": _MEDIA,
    "--enable-dbo": _SEVERAL_DEVICES,
    "--enable-eplb": _EXPERTS,
    "--enable-expert-parallel": _EXPERTS,
    "--enable-fault-tolerance": ForeignFlag("crash recovery is always on; --max-engine-restarts 0 turns it off", _OFF),
    "--enable-layerwise-nvtx-tracing": ForeignFlag("use --trace, or an external profiler", _OFF),
    "--enable-lora": _ADAPTERS,
    "--enable-lora-bias": _ADAPTERS,
    "--enable-mm-embeds": _MEDIA,
    "--enable-prompt-embeds": ForeignFlag("prompts are text or token ids, not embeddings", _OFF),
    "--enable-prompt-tokens-details": ForeignFlag("cached tokens are always reported", _ALWAYS, is_switch=True),
    "--enable-reasoning": ForeignFlag("use --reasoning-parser alone", _OFF),
    "--enable-request-id-headers": ForeignFlag("answers always carry X-Request-Id", _ALWAYS, is_switch=True),
    "--enable-scale-out": ForeignFlag(
        "there are no separate routes for rendering; /tokenize renders conversations", _OFF
    ),
    "--enable-server-load-tracking": ForeignFlag("/load always counts requests", _ALWAYS, is_switch=True),
    "--enable-tower-connector-lora": _ADAPTERS,
    "--eplb-config": _EXPERTS,
    "--expert-placement-strategy": _EXPERTS,
    "--fully-sharded-loras": _ADAPTERS,
    "--hf-config-path": ForeignFlag("config.json is read from the model; --hf-overrides replaces values in it"),
    "--ignore-patterns": ForeignFlag("only the needed files of a repository are downloaded"),
    "--interleave-mm-strings": _MEDIA,
    "--io-processor-plugin": _PLUGINS,
    "--kv-events-config": _KV_ELSEWHERE,
    "--kv-offloading-backend": _KV_ELSEWHERE,
    "--kv-offloading-size": _KV_ELSEWHERE,
    "--kv-sharing-fast-prefill": ForeignFlag("no supported model shares its KV cache between layers", _OFF),
    "--kv-transfer-config": _KV_ELSEWHERE,
    "--limit-mm-per-prompt": _MEDIA,
    "--log-error-stack": ForeignFlag("unexpected errors are always logged with their stack", (*_BARE, *_OFF)),
    "--logits-processor-pattern": ForeignFlag("requests cannot name logits processors; --logits-processors loads them"),
    "--lora-dtype": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--mamba-block-size": _STATE_SPACE,
    "--mamba-cache-dtype": _STATE_SPACE,
    "--mamba-ssm-cache-dtype": _STATE_SPACE,
    "--master-addr": _ONE_MACHINE,
    "--master-port": _ONE_MACHINE,
    "--max-cpu-loras": _ADAPTERS,
    "--max-lora-rank": _ADAPTERS,
    "--max-loras": _ADAPTERS,
    "--max-parallel-loading-workers": _WEIGHT_FILES,
    "--max-seq-len-to-capture": ForeignFlag(
        "captured steps work for any length; --cudagraph-capture-sizes sets batch sizes"
    ),
    "--media-io-kwargs": _MEDIA,
    "--mm-encoder-attn-backend": _MEDIA,
    "--mm-encoder-tp-mode": _MEDIA,
    "--mm-processor-cache-gb": _MEDIA,
    "--mm-processor-cache-type": _MEDIA,
    "--mm-processor-kwargs": _MEDIA,
    "--mm-shm-cache-max-object-size-mb": _MEDIA,
    "--model-loader-extra-config": _WEIGHT_FILES,
    "--nnodes": ForeignFlag(_ONE_MACHINE.reason, ("1",)),
    "--node-rank": ForeignFlag(_ONE_MACHINE.reason, ("0",)),
    "--num-scheduler-steps": ForeignFlag("every step is scheduled; --stream-interval makes chunks larger", ("1",)),
    "--optimization-level": _COMPILATION,
    "--override-attention-dtype": ForeignFlag("use --dtype, which applies to the whole model"),
    "--prefill-context-parallel-size": ForeignFlag(_SEVERAL_DEVICES.reason, ("1",)),
    "--prefix-caching-hash-algo": ForeignFlag(
        "prefixes are compared token by token, without hashes", ("builtin", "sha256")
    ),
    "--profiler-config": ForeignFlag("use an external profiler, such as py-spy or perf"),
    "--pt-load-map-location": ForeignFlag("weights are read from safetensors, never from pickles", ("cpu",)),
    "--ray-workers-use-nsight": ForeignFlag("Ray is not used", _OFF),
    "--safetensors-load-strategy": _WEIGHT_FILES,
    "--scheduler-cls": _OWN_CLASSES,
    "--scheduler-reserve-full-isl": ForeignFlag("blocks are allocated while a prompt is computed", _OFF),
    "--show-hidden-metrics-for-version": ForeignFlag("no metrics are hidden"),
    "--skip-mm-profiling": _NO_SUCH_THING,
    "--specialize-active-lora": _ADAPTERS,
    "--tokenizer-mode": ForeignFlag("every tokenizer is a fast one", ("auto", "hf")),
    "--tool-server": ForeignFlag("tools run on clients, not on this server"),
    "--trust-remote-code": _NO_REPOSITORY_CODE,
    "--use-tqdm-on-load": ForeignFlag("the log reports the stages of the start", (*_BARE, *_OFF)),
    "--video-pruning-rate": _MEDIA,
    "--weight-transfer-config": ForeignFlag("weights cannot be replaced while the server runs"),
    "--worker-cls": _OWN_CLASSES,
    "--worker-extension-cls": _OWN_CLASSES,
}
