"""Flags of vLLM that have no meaning here: refused with a sentence that says what to use instead, never ignored."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a flag is refused, and the values that are not.

    Attributes:
        reason: The end of a sentence that begins with the flag.
        harmless: Values that mean what the server does anyway; empty text is the flag without a value.
    """

    reason: str
    harmless: tuple[str, ...] = ()


_OFF = ("false", "0")
_BARE = ("", "true")

_ADAPTERS = Refusal("adapters (LoRA) are not served yet", _OFF)
_MEDIA = Refusal("only text is served: images, audio and video are not supported yet", _OFF)
_SEVERAL_DEVICES = Refusal(
    "an engine core runs on one device; --data-parallel-size N runs several engine cores side by side", _OFF
)
_ONE_MACHINE = Refusal("all engine cores run on this machine; put a load balancer before several servers")
_EXPERTS = Refusal("experts are not spread over devices: an engine core runs on one", _OFF)
_NO_SUCH_THING = Refusal("it turns off what this server does not have", (*_BARE, *_OFF))
_KV_ELSEWHERE = Refusal("the KV cache stays in this process; --num-host-blocks N lets it swap to host memory", _OFF)
_COMPILATION = Refusal("nothing is compiled at start; --enforce-eager turns recorded steps off")
_KERNELS = Refusal("kernels are chosen by the machine, and /server_info names them under engine.backends", ("auto",))
_STATE_SPACE = Refusal("models with a state in place of a KV cache are not supported")
_NO_REPOSITORY_CODE = Refusal(
    "code out of a model's repository is never run here; --model-impl transformers runs every architecture that "
    "transformers has, and packages may bring more by entry point",
    _OFF,
)
_OWN_CLASSES = Refusal("classes of the engine cannot be replaced; --middleware and --logits-processors can be added")
_ROPE = Refusal("""use --hf-overrides, such as --hf-overrides '{"rope_parameters": {...}}'""")
_SPECULATION = Refusal("""use --speculative-config, such as '{"method": "ngram", "num_speculative_tokens": 5}'""")
_PLUGINS = Refusal("plug-ins of vLLM cannot be loaded")
_WEIGHT_FILES = Refusal("weights are mapped from safetensors in the one way there is", ("auto", "lazy", *_OFF))

REFUSALS: Mapping[str, Refusal] = {
    "--additional-config": _PLUGINS,
    "--all2all-backend": _EXPERTS,
    "--allow-deprecated-quantization": Refusal("--quantization takes int8, int4 and fp8 only", _OFF),
    "--allowed-local-media-path": _MEDIA,
    "--allowed-media-domains": _MEDIA,
    "--attention-backend": _KERNELS,
    "--attention-config": _KERNELS,
    "--block-size-override": Refusal("use --block-size"),
    "--calculate-kv-scales": Refusal("the scales of an fp8 KV cache are the checkpoint's, or 1", _OFF),
    "--code-revision": _NO_REPOSITORY_CODE,
    "--compilation-config": _COMPILATION,
    "--config-format": Refusal("configurations are those of the hub, in config.json", ("auto", "hf")),
    "--cpu-offload-gb": Refusal("weights stay where they are computed with; --quantization int8 halves them", _OFF),
    "--cudagraph-metrics": _COMPILATION,
    "--data-parallel-address": _ONE_MACHINE,
    "--data-parallel-external-lb": _ONE_MACHINE,
    "--data-parallel-hybrid-lb": _ONE_MACHINE,
    "--data-parallel-rank": _ONE_MACHINE,
    "--data-parallel-rpc-port": _ONE_MACHINE,
    "--data-parallel-size-local": _ONE_MACHINE,
    "--data-parallel-start-rank": _ONE_MACHINE,
    "--default-mm-loras": _ADAPTERS,
    "--device": Refusal("the device is a GPU if there is one, else the processor", ("auto",)),
    "--disable-cascade-attn": _NO_SUCH_THING,
    "--disable-custom-all-reduce": _NO_SUCH_THING,
    "--disable-hybrid-kv-cache-manager": Refusal("layers with a window always keep only what they need", _OFF),
    "--disable-mm-preprocessor-cache": _NO_SUCH_THING,
    "--disable-sliding-window": Refusal("use --max-model-len with the length of the window, to the same effect", _OFF),
    "--distributed-executor-backend": Refusal("an engine core runs on one device in one process", ("mp", "uni")),
    "--distributed-timeout-seconds": _SEVERAL_DEVICES,
    "--ec-transfer-config": _MEDIA,
    "--enable-dbo": _SEVERAL_DEVICES,
    "--enable-eplb": _EXPERTS,
    "--enable-expert-parallel": _EXPERTS,
    "--enable-fault-tolerance": Refusal("that is always so; --max-engine-restarts 0 turns it off", _OFF),
    "--enable-layerwise-nvtx-tracing": Refusal("use --trace, or a profiler from outside", _OFF),
    "--enable-lora": _ADAPTERS,
    "--enable-lora-bias": _ADAPTERS,
    "--enable-mm-embeds": _MEDIA,
    "--enable-prompt-embeds": Refusal("prompts are text or token ids", _OFF),
    "--enable-reasoning": Refusal("use --reasoning-parser alone", _OFF),
    "--enable-scale-out": Refusal("there are no routes for rendering apart; /tokenize renders conversations", _OFF),
    "--enable-tower-connector-lora": _ADAPTERS,
    "--enable-trace-replay": Refusal("use --record-steps FILE and llmstack replay FILE", _OFF),
    "--eplb-config": _EXPERTS,
    "--expert-placement-strategy": _EXPERTS,
    "--fully-sharded-loras": _ADAPTERS,
    "--guided-decoding-backend": Refusal("use --structured-outputs-config", ("auto",)),
    "--hf-config-path": Refusal("config.json is the model's own; --hf-overrides changes values in it"),
    "--ignore-patterns": Refusal("only what is needed of a repository is fetched"),
    "--interleave-mm-strings": _MEDIA,
    "--io-processor-plugin": _PLUGINS,
    "--kv-events-config": _KV_ELSEWHERE,
    "--kv-offloading-backend": _KV_ELSEWHERE,
    "--kv-offloading-size": _KV_ELSEWHERE,
    "--kv-sharing-fast-prefill": Refusal("no model that is served shares KV between layers", _OFF),
    "--kv-transfer-config": _KV_ELSEWHERE,
    "--limit-mm-per-prompt": _MEDIA,
    "--log-error-stack": Refusal("an error nobody foresaw is always logged with its stack", (*_BARE, *_OFF)),
    "--logits-processor-pattern": Refusal("requests cannot name processors; --logits-processors loads them"),
    "--lora-dtype": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--mamba-block-size": _STATE_SPACE,
    "--mamba-cache-dtype": _STATE_SPACE,
    "--mamba-ssm-cache-dtype": _STATE_SPACE,
    "--master-addr": _ONE_MACHINE,
    "--master-port": _ONE_MACHINE,
    "--max-cpu-loras": _ADAPTERS,
    "--max-long-partial-prefills": Refusal("use --max-num-partial-prefills, which counts prompts of any length"),
    "--max-lora-rank": _ADAPTERS,
    "--max-loras": _ADAPTERS,
    "--max-parallel-loading-workers": _WEIGHT_FILES,
    "--max-seq-len-to-capture": Refusal("recorded steps hold for any length; --cudagraph-capture-sizes counts rows"),
    "--media-io-kwargs": _MEDIA,
    "--mm-encoder-attn-backend": _MEDIA,
    "--mm-encoder-tp-mode": _MEDIA,
    "--mm-processor-cache-gb": _MEDIA,
    "--mm-processor-cache-type": _MEDIA,
    "--mm-processor-kwargs": _MEDIA,
    "--mm-shm-cache-max-object-size-mb": _MEDIA,
    "--model-loader-extra-config": _WEIGHT_FILES,
    "--nnodes": Refusal(_ONE_MACHINE.reason, ("1",)),
    "--node-rank": Refusal(_ONE_MACHINE.reason, ("0",)),
    "--num-scheduler-steps": Refusal("every step is scheduled; --stream-interval makes chunks larger", ("1",)),
    "--num-speculative-tokens": _SPECULATION,
    "--optimization-level": _COMPILATION,
    "--override-attention-dtype": Refusal("use --dtype, which holds for the whole model"),
    "--prefill-context-parallel-size": Refusal(_SEVERAL_DEVICES.reason, ("1",)),
    "--prefix-caching-hash-algo": Refusal(
        "prefixes are compared token by token, without a hash", ("builtin", "sha256")
    ),
    "--profiler-config": Refusal("use a profiler from outside, such as py-spy or perf"),
    "--pt-load-map-location": Refusal("weights are read from safetensors, never from pickles", ("cpu",)),
    "--ray-workers-use-nsight": Refusal("Ray is not used", _OFF),
    "--rope-scaling": _ROPE,
    "--rope-theta": _ROPE,
    "--runner-type": Refusal("use --runner"),
    "--safetensors-load-strategy": _WEIGHT_FILES,
    "--scheduler-cls": _OWN_CLASSES,
    "--scheduler-reserve-full-isl": Refusal("blocks are taken as a prompt is computed", _OFF),
    "--show-hidden-metrics-for-version": Refusal("no metric is hidden"),
    "--skip-mm-profiling": _NO_SUCH_THING,
    "--specialize-active-lora": _ADAPTERS,
    "--speculative-model": _SPECULATION,
    "--tokens-only": Refusal("use --skip-tokenizer-init", _OFF),
    "--tool-server": Refusal("tools are run by clients, not by this server"),
    "--trust-remote-code": _NO_REPOSITORY_CODE,
    "--use-tqdm-on-load": Refusal("the log says what the start does", (*_BARE, *_OFF)),
    "--video-pruning-rate": _MEDIA,
    "--weight-transfer-config": Refusal("weights cannot be replaced while the server runs"),
    "--worker-cls": _OWN_CLASSES,
    "--worker-extension-cls": _OWN_CLASSES,
}


class RefusedFlag(argparse.Action):
    """A known flag that is refused, unless its value changes nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Ends the command line, or does nothing."""
        refusal = REFUSALS[self.option_strings[0]]
        if str("" if values is None else values).lower() not in refusal.harmless:
            parser.error(f"{option_string}: {refusal.reason}")


def add_refused_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of this module, which `--help` does not show and the namespace does not hold."""
    for flag in REFUSALS:
        parser.add_argument(flag, action=RefusedFlag, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
