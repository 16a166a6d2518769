"""The flags of `llmstack serve`: vLLM's names and defaults; the standard library only, since `--help` loads it."""

from __future__ import annotations

import argparse

from llmstack_server.chat.options import add_chat_arguments
from llmstack_server.config_file import ConfigFileAction
from llmstack_server.flag_types import (
    JoinedLists,
    at_least,
    chat_template,
    count,
    gibibytes,
    json_object,
    module_and_class,
    port,
    quantization,
    row_counts,
    seconds,
    share,
)
from llmstack_server.flags_http import add_http_arguments
from llmstack_server.flags_processes import add_process_arguments
from llmstack_server.flags_use import add_use_arguments
from llmstack_server.observability import add_observability_arguments
from llmstack_server.refused_flags import add_refused_arguments

DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLS = ("auto", "llmstack", "transformers")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every flag of `llmstack serve`."""
    _add_model_arguments(parser)
    _add_repository_arguments(parser)
    add_use_arguments(parser)
    _add_engine_arguments(parser)
    _add_device_arguments(parser)
    _add_kv_cache_arguments(parser)
    _add_sampling_arguments(parser)
    _add_server_arguments(parser)
    add_chat_arguments(parser)
    add_http_arguments(parser)
    add_observability_arguments(parser)
    add_process_arguments(parser)
    add_refused_arguments(parser)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "model_tag",
        nargs="?",
        metavar="model",
        help="Hugging Face repository id or local folder; without one the embedded demo model is served",
    )
    add("--model", default=None, help="the same as the positional model, which wins where both are given")
    add(
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names in the API; the first is reported",
    )
    add("--load-format", choices=LOAD_FORMATS, default="auto", help="'dummy' makes random weights (default: auto)")
    add(
        "--model-impl",
        choices=MODEL_IMPLS,
        default="auto",
        help="whose modelling code runs; 'auto' is ours where we have it, else transformers' (default: auto)",
    )
    add("--dtype", choices=DTYPES, default="auto", help="'auto' is the checkpoint's (default: auto)")
    add(
        "--quantization",
        "-q",
        type=quantization,
        metavar="{int8,int4,fp8}",
        help="round the weights of linear layers on loading (default: keep their precision)",
    )
    add(
        "--max-model-len", type=at_least(-1, count), metavar="N", help="longest request in tokens, such as 4096, 4k, 4K"
    )
    add(
        "--chat-template",
        type=chat_template,
        metavar="FILE",
        help="a Jinja file, or the template itself (default: the model's)",
    )
    add(
        "--generation-config",
        default="auto",
        help="sampling defaults: 'auto' takes the model's generation_config.json, 'vllm' none, a folder its own "
        "(default: auto)",
    )
    add(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help='sampling defaults in place of those, such as {"temperature": 0.2}',
    )
    add("--seed", type=int, default=0, help="seed of dummy weights and of unseeded requests (default: 0)")


def _add_repository_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("repository and tokenizer").add_argument
    add("--tokenizer", help="folder or repository id of the tokenizer (default: the model's)")
    add("--tokenizer-revision", metavar="REVISION", help="branch, tag or commit of --tokenizer")
    add(
        "--tokenizer-mode",
        choices=("auto", "hf"),
        default="auto",
        help="accepted; every tokenizer is a fast one (default: auto)",
    )
    add("--skip-tokenizer-init", action="store_true", help="no tokenizer: token ids in, token ids out")
    add("--revision", help="branch, tag or commit of the repository")
    add("--hf-overrides", type=json_object, metavar="JSON", help="values in place of those in config.json")
    add(
        "--hf-token",
        nargs="?",
        const="",
        metavar="TOKEN",
        help="for private and gated repositories; better in HF_TOKEN, whose value it takes where it has none",
    )
    add("--download-dir", metavar="DIR", help="where repositories are kept (default: that of huggingface-hub)")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--max-num-seqs", type=at_least(1), default=256, metavar="N", help="requests per step at most (default: 256)")
    add(
        "--max-num-batched-tokens",
        type=at_least(1, count),
        metavar="N",
        help="tokens per step at most (default: 2048; the longest request without chunked prefill)",
    )
    boolean = argparse.BooleanOptionalAction
    add("--enable-chunked-prefill", action=boolean, default=True, help="let a long prompt span several steps")
    add(
        "--long-prefill-token-threshold",
        type=at_least(0, count),
        default=0,
        metavar="N",
        help="tokens of one request per step at most, 0 for no such limit (default: 0)",
    )
    add(
        "--max-num-partial-prefills",
        type=at_least(0),
        default=0,
        metavar="N",
        help="requests in the midst of their prompts at once, 0 for no limit (default: 0)",
    )
    add(
        "--async-scheduling",
        action=boolean,
        help="schedule a step before the last one's tokens arrive (default: on a GPU, without --speculative-config)",
    )
    add(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="draft tokens that a step verifies, such as "
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
    )
    add(
        "--structured-outputs-config",
        type=json_object,
        metavar="JSON",
        help='options of structured output, such as {"backend": "auto", "disable_any_whitespace": true}',
    )
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="order of requests (default: fcfs)")
    add("--max-num-queued-reqs", type=at_least(1), metavar="N", help="503 beyond this many unfinished (default: 1024)")
    add(
        "--max-num-queued-tokens",
        type=at_least(1, count),
        metavar="N",
        help="503 beyond this many prompt tokens of requests without a first token (default: no limit)",
    )
    add("--tensor-parallel-size", "-tp", type=at_least(1), default=1, metavar="N", help="only 1 for now")
    add("--pipeline-parallel-size", "-pp", type=at_least(1), default=1, metavar="N", help="only 1 for now")
    add("--disable-log-stats", action="store_true", help="no statistics from the engine")
    add("--record-steps", metavar="FILE", help="keep the log of every step, with all token ids, for llmstack replay")


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("computing").add_argument
    add(
        "--enforce-eager",
        action="store_true",
        help="record no decode steps: no CUDA graphs on a GPU, no native recordings on a CPU; for debugging",
    )
    add(
        "--cudagraph-capture-sizes",
        type=row_counts,
        action=JoinedLists,
        nargs="+",
        metavar="N",
        help="numbers of decoding rows for which steps are recorded on a GPU, such as 1 2 4 8 or 1,2,4,8 "
        "(default: the runner's own list up to --max-num-seqs)",
    )
    add(
        "--enable-deterministic-inference",
        action="store_true",
        help="refuse to start unless logits are bit-equal however they are computed: alone, in any batch, in chunks",
    )


def _add_kv_cache_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("KV cache").add_argument
    add("--block-size", type=at_least(1), default=16, metavar="N", help="tokens per KV block (default: 16)")
    add(
        "--num-kv-blocks",
        "--num-gpu-blocks-override",
        type=at_least(1, count),
        metavar="N",
        help="blocks of the KV cache (default: from the memory at hand)",
    )
    add("--kv-cache-memory-bytes", type=at_least(1, count), metavar="N", help="size of the KV cache, such as 512M")
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="what keys and values are stored in; 'fp8' takes half the room of 16 bits, for a little accuracy, 'auto' "
        "is what the model computes in (default: auto)",
    )
    add("--gpu-memory-utilization", type=share, default=0.9, metavar="X", help="share of GPU memory (default: 0.9)")
    boolean = argparse.BooleanOptionalAction
    add("--enable-prefix-caching", action=boolean, default=True, help="reuse the KV blocks of equal prefixes")
    add(
        "--num-host-blocks",
        type=at_least(0, count),
        default=0,
        metavar="N",
        help="blocks in host memory to swap preempted requests to, 0 to recompute them (default: 0)",
    )
    add("--swap-space", type=gibibytes, default=0.0, metavar="GIB", help="size of these in GiB instead (default: 0)")


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add(
        "--logits-processors",
        type=module_and_class,
        nargs="+",
        action="extend",
        default=[],
        metavar="MODULE:CLASS",
        help="custom logits processors, in the order they are applied",
    )
    add(
        "--logprobs-mode",
        choices=LOGPROBS_MODES,
        default=LOGPROBS_MODES[0],
        help="log-probabilities of the model, or those a token was drawn by (default: raw_logprobs)",
    )
    add(
        "--max-logprobs",
        type=at_least(-1),
        default=20,
        metavar="N",
        help="most likely tokens that a request may ask for, -1 for the whole vocabulary (default: 20)",
    )


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=port, help="port to listen on; 0 lets the system choose and prints it (default: 8000)")
    add("--api-key", nargs="+", action="extend", metavar="KEY", help="accepted keys; better in LLMSTACK_API_KEY")
    add("--api-key-file", metavar="FILE", help="accepted keys, one per line")
    add("--open-metrics", action="store_true", help="let /metrics be read without a key")
    add("--require-auth", action="store_true", help="refuse to start without an API key")
    add(
        "--shutdown-timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM; 0 aborts them (default: 30)",
    )
    add("--config", action=ConfigFileAction, metavar="FILE", help="flags from a YAML file; those given here win")
    add("--strict-params", action="store_true", help="refuse unknown request fields instead of ignoring them")
    add("--enable-control-routes", action="store_true", help="open POST /reset_prefix_cache")
    add("--enable-server-load-tracking", action="store_true", help="accepted; /load always counts")
    add("--enable-prompt-tokens-details", action="store_true", help="accepted; cached tokens are always reported")
    add("--no-metrics-aliases", action="store_true", help="export metrics as llmstack: only, without vllm: names")
    add("--log-level", choices=LOG_LEVELS, help="level of llmstack's log (default: info)")
    add("--uvicorn-log-level", choices=LOG_LEVELS, default="info", help="level of uvicorn's log (default: info)")
    add("--disable-uvicorn-access-log", action="store_true", help="no line per HTTP request")
