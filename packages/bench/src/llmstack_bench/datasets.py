"""Workloads that the flags describe, as text or token ids."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmstack_bench.agents import session_maker
from llmstack_bench.errors import BenchError
from llmstack_bench.jsonl import read_requests
from llmstack_bench.pictures import with_pictures
from llmstack_bench.published import published_requests, read_rows
from llmstack_bench.traces import TimedTraceFormat, TraceWorkload, read_trace, timed_requests
from llmstack_bench.workload import BenchRequest, RandomWorkload
from llmstack_types.agent_profiles import AgentWorkload
from llmstack_types.traces import TOKENS_PER_HASH_ID

# Every vocabulary in use has at least its bytes; a token id above the vocabulary would be refused.
SAFE_VOCAB_SIZE = 256
DEFAULT_SHARED_PREFIX_LEN = 256
WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "by", "with", "as", "at", "it", "from")

GENERATED = ("random", "shared-prefix", "pictures", "agents")
"""Data sets that need no file."""
MakeRequests = Callable[[int], list[BenchRequest]]


def request_maker(options: argparse.Namespace, vocab_size: int, *, is_chat: bool) -> MakeRequests:
    """A function from a seed to the requests of one run. Files are read once, here.

    Raises:
        BenchError: A flag or a file is wrong.
    """
    if options.dataset_name not in GENERATED and options.dataset_path is None:
        raise BenchError(f"--dataset-path: is needed for --dataset-name {options.dataset_name}", exit_code=2)
    if options.dataset_name == "custom":
        output_len = options.custom_output_len
        requests = read_requests(options.dataset_path, options.num_prompts, options.random_output_len)
        if output_len is not None and output_len > 0:
            requests = [replace(request, num_output_tokens=output_len) for request in requests]
        return lambda seed: requests
    if options.dataset_name in ("sharegpt", "sonnet", "spec-bench", "hf"):
        requests = published_requests(options, _token_counter(options.tokenizer), vocab_size, options.seed)
        return lambda seed: requests
    if options.dataset_name == "agents":
        workload = AgentWorkload(
            options.agent_sessions, options.agent_profile, gap_s=options.agent_gap,
            length_scale=options.trace_length_scale,
        )  # fmt: skip
        return session_maker(options.dataset_path, workload, text_maker(options.tokenizer), vocab_size)
    if options.dataset_name == "pictures":
        make = _as_text(_random_maker(options, vocab_size), options.tokenizer)
        pictures = (options.num_pictures, options.picture_size, options.picture_interval)
        return lambda seed: with_pictures(make(seed), *pictures, seed)
    make = _token_maker(options, vocab_size)
    if options.prompt_format == "token-ids" or (options.prompt_format == "auto" and not is_chat):
        return make
    return _as_text(make, options.tokenizer)


def _as_text(make: MakeRequests, tokenizer_path: Path | None) -> MakeRequests:
    to_text = text_maker(tokenizer_path)
    return lambda seed: [replace(request, prompt=to_text(request.prompt)) for request in make(seed)]


def _token_maker(options: argparse.Namespace, vocab_size: int) -> MakeRequests:
    if options.dataset_name == "burstgpt":
        return lambda seed: published_requests(options, len, vocab_size, seed)
    is_trace = options.dataset_name in ("trace", "timed-trace")
    return _trace_maker(options, vocab_size) if is_trace else _random_maker(options, vocab_size)


def _token_counter(tokenizer_path: Path | None) -> Callable[[str], int]:
    """Counts the tokens of a text: exactly with a tokenizer, else as one for four characters."""
    if tokenizer_path is None:
        return lambda text: max(1, len(text) // 4)
    tokenizer = _read_tokenizer(tokenizer_path)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def text_maker(tokenizer_path: Path | None) -> Callable[[Any], str]:
    """A function from token ids to text of about that many tokens: exact only as far as the tokenizer round-trips.

    Without a tokenizer a token id becomes a common word, which is one token in most vocabularies.

    Raises:
        BenchError: The tokenizer cannot be read.
    """
    if tokenizer_path is None:
        return lambda token_ids: " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)
    tokenizer = _read_tokenizer(tokenizer_path)
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def find_vocab_size(
    explicit: int | None, tokenizer_path: Path | None, models: Sequence[Mapping[str, Any]]
) -> tuple[int, str]:
    """A vocabulary size that is valid for every model under test, and its source.

    `models`: The servers' lists of models. In those of vLLM and llmstack, `root` is a folder, perhaps on this machine.

    Raises:
        BenchError: The tokenizer cannot be read.
    """
    if explicit is not None:
        return explicit, "--vocab-size"
    if tokenizer_path is not None:
        return int(_read_tokenizer(tokenizer_path).get_vocab_size()), "--tokenizer"
    sizes = [_configured_vocab_size(str(model.get("root") or model.get("id"))) for model in models]
    known = [size for size in sizes if size is not None]
    if known and len(known) == len(sizes):
        return min(known), "the model's configuration"
    return SAFE_VOCAB_SIZE, "a safe guess; --vocab-size overrides it"


def warmup_requests(make: MakeRequests, num_requests: int, seed: int) -> list[BenchRequest]:
    """Requests like those of the run, with different random tokens."""
    requests = make(seed)
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    return rng.sample(requests, min(num_requests, len(requests)))


def _random_maker(options: argparse.Namespace, vocab_size: int) -> MakeRequests:
    is_shared = options.dataset_name == "shared-prefix"
    workload = RandomWorkload(
        options.num_prompts,
        options.random_input_len,
        options.random_output_len,
        options.random_prefix_len or (DEFAULT_SHARED_PREFIX_LEN if is_shared else 0),
        options.num_prefixes,
        options.random_range_ratio,
        vocab_size,
    )
    return lambda seed: replace(workload, seed=seed).requests()


def _trace_maker(options: argparse.Namespace, vocab_size: int) -> MakeRequests:
    num_block_tokens = TOKENS_PER_HASH_ID
    if options.dataset_name == "timed-trace":
        trace_format = TimedTraceFormat(
            options.timed_trace_label_timestamp,
            options.timed_trace_label_input_length,
            options.timed_trace_label_output_length,
            options.timed_trace_label_hash_ids,
            options.timed_trace_sec_multiplier,
        )
        rows = read_rows(options.dataset_path)
        trace = timed_requests(options.dataset_path, rows, trace_format, options.num_prompts)
        num_block_tokens = options.timed_trace_chunk_hash_size
    else:
        trace = read_trace(options.dataset_path, options.num_prompts)
    workload = TraceWorkload(
        options.trace_speed, options.trace_length_scale, vocab_size, num_block_tokens=num_block_tokens
    )
    return lambda seed: replace(workload, seed=seed).requests(trace)


def _configured_vocab_size(folder: str) -> int | None:
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def _read_tokenizer(path: Path) -> Any:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise BenchError(
            "--tokenizer: needs the package tokenizers: pip install 'llmstack-bench[tokenizer]'"
        ) from error
    path = path if path.exists() else _cached_repository(path) or path
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise BenchError(
            f"--tokenizer {path}: no such file or folder, and no repository in the hub's cache", exit_code=2
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one for a file it cannot read
        raise BenchError(f"--tokenizer {file}: {error}", exit_code=2) from error


def _cached_repository(path: Path) -> Path | None:
    """The newest snapshot of a repository in the cache of the Hugging Face hub; nothing is downloaded."""
    home = Path(os.environ.get("HF_HOME", Path("~/.cache/huggingface").expanduser()))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    if len(path.parts) > 2 or path.is_absolute() or ".." in path.parts:
        return None
    snapshots = (cache / "--".join(("models", *path.parts)) / "snapshots").glob("*/tokenizer.json")
    newest = max(snapshots, key=lambda file: file.stat().st_mtime, default=None)
    return None if newest is None else newest.parent
