"""Flags of vLLM that do nothing here yet: refused by name, so that nobody believes one took effect."""

from __future__ import annotations

_FLAGS = """
--additional-config --all2all-backend --allow-deprecated-quantization
--allowed-local-media-path --allowed-media-domains
--attention-backend --attention-config --block-size-override --calculate-kv-scales
--code-revision --compilation-config --config-format --cpu-offload-gb
--cudagraph-capture-sizes --cudagraph-metrics --data-parallel-address
--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-rank --data-parallel-rpc-port
--data-parallel-size-local --data-parallel-start-rank
--default-mm-loras --disable-cascade-attn --disable-custom-all-reduce
--disable-hybrid-kv-cache-manager --disable-mm-preprocessor-cache
--disable-sliding-window --distributed-executor-backend --distributed-timeout-seconds
--ec-transfer-config --enable-dbo --enable-eplb --enable-expert-parallel
--enable-fault-tolerance --enable-layerwise-nvtx-tracing
--enable-lora --enable-lora-bias --enable-mm-embeds
--enable-prompt-embeds --enable-scale-out
--enable-tower-connector-lora --enable-trace-replay --eplb-config
--expert-placement-strategy --fully-sharded-loras
--hf-config-path --ignore-patterns
--interleave-mm-strings --io-processor-plugin --kv-cache-dtype --kv-cache-metrics --kv-events-config
--kv-offloading-backend --kv-offloading-size --kv-sharing-fast-prefill --kv-transfer-config --limit-mm-per-prompt
--log-error-stack --logits-processor-pattern
--lora-dtype --lora-modules --mamba-block-size --mamba-cache-dtype
--mamba-ssm-cache-dtype --master-addr --master-port --max-cpu-loras
--max-long-partial-prefills --max-lora-rank --max-loras
--max-parallel-loading-workers --media-io-kwargs --mm-encoder-attn-backend --mm-encoder-tp-mode
--mm-processor-cache-gb --mm-processor-cache-type --mm-processor-kwargs --mm-shm-cache-max-object-size-mb
--model-loader-extra-config --nnodes --node-rank --optimization-level
--override-attention-dtype --prefill-context-parallel-size
--prefix-caching-hash-algo --profiler-config --pt-load-map-location --ray-workers-use-nsight
--runner-type
--safetensors-load-strategy --scheduler-cls --scheduler-reserve-full-isl --show-hidden-metrics-for-version
--skip-mm-profiling --specialize-active-lora
--swap-space
--tokens-only --tool-server
--trust-remote-code --use-tqdm-on-load --video-pruning-rate
--weight-transfer-config --worker-cls --worker-extension-cls
"""

NOT_AVAILABLE = frozenset(_FLAGS.split())
