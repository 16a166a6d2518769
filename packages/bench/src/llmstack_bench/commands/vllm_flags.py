"""Flags of `vllm bench serve` beside those that this command has of its own."""

from __future__ import annotations

import argparse
from typing import Any

from llmstack_bench.commands.foreign_flags import add_foreign_arguments
from llmstack_bench.commands.values import backend, json_object, key_value, natural_int, positive_float, positive_int
from llmstack_bench.errors import BenchError

# What speaks OpenAI's API under another name, and the route that the name stands for.
BACKENDS = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "llmstack": "/v1/completions",
    "lmdeploy": "/v1/completions",
    "sglang": "/v1/completions",
    "sglang-oai": "/v1/completions",
    "sglang-oai-chat": "/v1/chat/completions",
    "vllm-chat": "/v1/chat/completions",
    "llama.cpp": "/v1/completions",
}
PUBLISHED = ("sharegpt", "sonnet", "burstgpt", "spec-bench", "hf")
"""Data sets that `published` reads."""
_SAMPLING = {
    "--top-p": float, "--top-k": int, "--min-p": float, "--frequency-penalty": float, "--presence-penalty": float,
    "--repetition-penalty": float,
}  # fmt: skip


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what a pasted line may have; `resolved` gives it a meaning."""
    add = parser.add_argument_group("as in vllm bench serve").add_argument
    add("--backend", "--endpoint-type", type=backend, choices=tuple(BACKENDS), metavar="NAME",
        help=f"which API: {', '.join(BACKENDS)} (default: what --endpoint says)")  # fmt: skip
    add("--served-model-name", metavar="NAME", help="name of the model in requests; --model is then its folder")
    add("--input-len", type=positive_int, metavar="N", help="a prompt's tokens, of each data set that has lengths")
    add("--output-len", type=positive_int, metavar="N", help="tokens to generate, of each data set")
    add("--ready-check-timeout-sec", type=natural_int, default=0, metavar="S",
        help="wait this long for the server (default: 0)")  # fmt: skip
    for flag, kind in _SAMPLING.items():
        add(flag, type=kind, metavar="X", help=f"{flag[2:].replace('-', '_')} of every request")
    add("--logprobs", type=natural_int, metavar="N", help="log-probabilities of every request")
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help="values for the template, with a chat route")
    add("--lora-modules", nargs="+", default=[], metavar="NAME", help="adapters of the server, one for each request")
    add("--lora-assignment", choices=("random", "round-robin"), default="random", help="(default: random)")
    add("--request-id-prefix", metavar="TEXT", help="x-request-id of every request, before its number")
    add("--insecure", action="store_true", help="accept any certificate of the server")
    add("--profile", action="store_true", help="the server records a profile: /start_profile, then /stop_profile")
    add = parser.add_argument_group("ramp-up, as in vllm bench serve").add_argument
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="the request rate rises during the run")
    add("--ramp-up-start-rps", type=positive_float, metavar="R", help="rate at its start")
    add("--ramp-up-end-rps", type=positive_float, metavar="R", help="rate at its end")
    add_dataset_arguments(parser)
    _add_timed_trace_arguments(parser)
    add_foreign_arguments(parser, "serve")
    add = parser.add_argument_group("results, as in vllm bench serve").add_argument
    add("--result-filename", metavar="NAME", help="name of the file that --save-result writes")
    add("--append-result", action="store_true", help="add a line to that file instead of replacing it")
    add("--metadata", nargs="*", type=key_value, default=[], metavar="KEY=VALUE", help="further keys of the results")


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of published data sets."""
    add = parser.add_argument_group("data sets, as in vllm bench serve").add_argument
    add("--disable-shuffle", action="store_true", help="the first requests of the file, in its order")
    add("--no-oversample", action="store_true", help="send a short file once, and not again up to --num-prompts")
    add("--sharegpt-output-len", type=positive_int, metavar="N", help="(default: the length of the answer in the file)")
    add("--custom-output-len", type=int, metavar="N", help="-1 is the length in the file (default: that, else 128)")
    add("--sonnet-input-len", type=positive_int, default=550, metavar="N", help="(default: 550)")
    add("--sonnet-output-len", type=positive_int, default=150, metavar="N", help="(default: 150)")
    add("--sonnet-prefix-len", type=natural_int, default=200, metavar="N", help="(default: 200)")
    add("--spec-bench-output-len", type=positive_int, default=256, metavar="N", help="(default: 256)")
    add("--spec-bench-category", metavar="NAME", help="rows of this category (default: all)")
    add("--hf-output-len", type=positive_int, metavar="N", help="(default: 128)")
    add("--hf-subset", metavar="NAME", help="part of the path, in a folder of files")
    add("--hf-split", metavar="NAME", help="the same")
    add(
        "--prefix-repetition-prefix-len",
        "--gsp-system-prompt-len",
        type=positive_int,
        metavar="N",
        help="as --random-prefix-len",
    )
    add(
        "--prefix-repetition-suffix-len",
        "--gsp-question-len",
        type=positive_int,
        metavar="N",
        help="as --random-input-len",
    )
    add(
        "--prefix-repetition-num-prefixes", "--gsp-num-groups", type=positive_int, metavar="N", help="as --num-prefixes"
    )
    add(
        "--prefix-repetition-output-len",
        "--gsp-output-len",
        type=positive_int,
        metavar="N",
        help="as --random-output-len",
    )


def _add_timed_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("timed traces, as in vllm bench serve").add_argument
    add("--self-timed", action=argparse.BooleanOptionalAction, help="send at the times of the trace (default: yes)")
    add("--timed-trace-chunk-hash-size", type=positive_int, default=16, metavar="N",
        help="tokens that a hash id stands for (default: 16)")  # fmt: skip
    add("--timed-trace-sec-multiplier", type=positive_float, default=1.0, metavar="X",
        help="seconds that a unit of its times is (default: 1)")  # fmt: skip
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        flag = f"--timed-trace-label-{name.replace('_', '-')}"
        add(flag, default=name, metavar="KEY", help=f"(default: {name})")


_SAME = {
    "prefix_repetition_prefix_len": "random_prefix_len",
    "prefix_repetition_suffix_len": "random_input_len",
    "prefix_repetition_num_prefixes": "num_prefixes",
    "prefix_repetition_output_len": "random_output_len",
}
_OF_OUTPUT_LEN = (
    "random_output_len", "sharegpt_output_len", "custom_output_len", "sonnet_output_len", "spec_bench_output_len",
    "hf_output_len",
)  # fmt: skip


def resolved(options: argparse.Namespace) -> argparse.Namespace:
    """The options with what vLLM's spellings stand for.

    Raises:
        BenchError: Two flags exclude each other.
    """
    found = dict(vars(options))
    for name, same in _SAME.items():
        if found[name] is not None and found["dataset_name"] == "shared-prefix":
            found[same] = found[name]
    if options.input_len is not None:
        found["random_input_len"] = found["sonnet_input_len"] = options.input_len
    if options.output_len is not None:
        found |= dict.fromkeys(_OF_OUTPUT_LEN, options.output_len)
    if options.served_model_name is not None:
        found["model"] = [options.served_model_name]
    endpoint = found["endpoint"] = _endpoint(options)
    found["extra_body"] = _sampling(options, is_chat=endpoint.endswith("chat/completions")) | options.extra_body
    found["lengths_from"] = "4 characters a token" if options.tokenizer is None else "--tokenizer"
    _check_ramp_up(options)
    if options.self_timed is not None and options.dataset_name not in ("trace", "timed-trace"):
        raise BenchError("--self-timed: needs --dataset-name timed_trace or trace, which have times", exit_code=2)
    return argparse.Namespace(**found)


def _endpoint(options: argparse.Namespace) -> str:
    endpoint: str = options.endpoint or BACKENDS[options.backend or "openai"]
    is_chat = endpoint.rstrip("/").endswith("chat/completions")
    takes_chat = BACKENDS.get(options.backend, endpoint).endswith("chat/completions")
    if takes_chat and not is_chat:
        raise BenchError(f"--endpoint {endpoint}: --backend {options.backend} takes chat/completions", exit_code=2)
    if is_chat and not takes_chat:
        raise BenchError(f"--endpoint {endpoint}: takes --backend openai-chat", exit_code=2)
    return endpoint


def _sampling(options: argparse.Namespace, *, is_chat: bool) -> dict[str, Any]:
    names = [flag[2:].replace("-", "_") for flag in _SAMPLING]
    found = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": options.logprobs} if is_chat else {"logprobs": options.logprobs}
    if options.chat_template_kwargs is not None:
        if not is_chat:
            raise BenchError("--chat-template-kwargs: needs --backend openai-chat and its template", exit_code=2)
        found["chat_template_kwargs"] = options.chat_template_kwargs
    return found


def _check_ramp_up(options: argparse.Namespace) -> None:
    rates = (options.ramp_up_start_rps, options.ramp_up_end_rps)
    if options.ramp_up_strategy is None:
        if rates != (None, None):
            raise BenchError("--ramp-up-start-rps, --ramp-up-end-rps: need --ramp-up-strategy", exit_code=2)
        return
    if None in rates:
        raise BenchError("--ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps", exit_code=2)
    if options.request_rate is not None:
        raise BenchError("--request-rate: is set by --ramp-up-strategy", exit_code=2)
    if rates[0] > rates[1] or rates[1] == float("inf"):
        raise BenchError("--ramp-up-start-rps: must not be above --ramp-up-end-rps, which is finite", exit_code=2)
