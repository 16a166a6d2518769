"""Flags of vLLM that do nothing here yet: refused by name, so that nobody believes one took effect."""

from __future__ import annotations

_FLAGS = """
--additional-config --all2all-backend --allow-credentials --allow-deprecated-quantization --allowed-headers
--allowed-local-media-path --allowed-media-domains --allowed-methods --api-server-count
--attention-backend --attention-config --block-size-override --calculate-kv-scales --chat-template-content-format
--code-revision --collect-detailed-traces --compilation-config --config --config-format --convert --cpu-offload-gb
--cudagraph-capture-sizes --cudagraph-metrics --data-parallel-address --data-parallel-backend
--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-rank --data-parallel-rpc-port
--data-parallel-size --data-parallel-size-local --data-parallel-start-rank --default-chat-template-kwargs
--default-mm-loras --disable-cascade-attn --disable-custom-all-reduce --disable-fastapi-docs
--disable-frontend-multiprocessing --disable-hybrid-kv-cache-manager --disable-mm-preprocessor-cache
--disable-sliding-window --distributed-executor-backend --distributed-timeout-seconds --download-dir
--ec-transfer-config --enable-auto-tool-choice --enable-dbo --enable-eplb --enable-expert-parallel
--enable-fault-tolerance --enable-force-include-usage --enable-layerwise-nvtx-tracing --enable-log-outputs
--enable-log-requests --enable-lora --enable-lora-bias --enable-mm-embeds --enable-per-request-metrics
--enable-prompt-embeds --enable-request-id-headers --enable-scale-out --enable-sleep-mode --enable-ssl-refresh
--enable-tokenizer-info-endpoint --enable-tower-connector-lora --enable-trace-replay --eplb-config
--exclude-tools-when-tool-choice-none --expert-placement-strategy --fully-sharded-loras --h11-max-header-count
--h11-max-incomplete-event-size --headless --hf-config-path --hf-overrides --hf-token --ignore-patterns
--interleave-mm-strings --io-processor-plugin --kv-cache-dtype --kv-cache-metrics --kv-events-config
--kv-offloading-backend --kv-offloading-size --kv-sharing-fast-prefill --kv-transfer-config --limit-mm-per-prompt
--log-config-file --log-error-stack --logits-processor-pattern
--lora-dtype --lora-modules --mamba-block-size --mamba-cache-dtype
--mamba-ssm-cache-dtype --master-addr --master-port --max-cpu-loras --max-log-len --max-logprobs
--max-long-partial-prefills --max-lora-rank --max-loras --max-num-queued-tokens
--max-parallel-loading-workers --media-io-kwargs --middleware --mm-encoder-attn-backend --mm-encoder-tp-mode
--mm-processor-cache-gb --mm-processor-cache-type --mm-processor-kwargs --mm-shm-cache-max-object-size-mb
--model-loader-extra-config --nnodes --node-rank --optimization-level --otlp-traces-endpoint
--override-attention-dtype --override-generation-config --pooler-config --prefill-context-parallel-size
--prefix-caching-hash-algo --profiler-config --pt-load-map-location --ray-workers-use-nsight
--reasoning-parser --reasoning-parser-plugin --response-role --return-tokens-as-token-ids --root-path --runner-type
--safetensors-load-strategy --scheduler-cls --scheduler-reserve-full-isl --show-hidden-metrics-for-version
--skip-mm-profiling --skip-tokenizer-init --specialize-active-lora --ssl-ca-certs --ssl-cert-reqs
--ssl-certfile --ssl-ciphers --ssl-keyfile --stream-interval --structured-outputs-config --swap-space
--tokenizer-mode --tokenizer-revision --tokens-only --tool-call-parser --tool-parser-plugin --tool-server
--trust-remote-code --trust-request-chat-template --uds --use-tqdm-on-load --video-pruning-rate
--weight-transfer-config --worker-cls --worker-extension-cls
"""

NOT_AVAILABLE = frozenset(_FLAGS.split())
