"""Published data sets from files on this machine: ShareGPT, sonnets, others."""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_bench.workload import BenchRequest, TokenSource, check_total

CountTokens = Callable[[str], int]

MAX_FILE_BYTES = 4 << 30
# vLLM leaves out what ShareGPT has of broken and of very long conversations by these limits.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048
POEM_TASK = "Pick as many lines as you can from these poem lines:\n"
_TEXT_FIELDS = ("prompt", "question", "instruction", "text", "problem")


def published_requests(
    options: argparse.Namespace, count_tokens: CountTokens, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """The requests of `--dataset-name sharegpt`, `sonnet`, `burstgpt`, `spec-bench` or `hf`.

    A file with fewer requests than asked for is repeated, unless `--no-oversample`.

    Raises:
        BenchError: The file cannot be read, or has nothing to send.
    """
    path, rng = options.dataset_path, random.Random(seed)  # noqa: S311 - a workload, not a secret
    if options.dataset_name == "sonnet":
        return _sonnets(path, options, count_tokens, rng)
    if options.dataset_name == "burstgpt":
        found = _burst_requests(path, TokenSource(rng, vocab_size))
    else:
        rows = read_rows(_file_of(path, options))
        if not options.disable_shuffle:
            rng.shuffle(rows)
        read = {"sharegpt": _conversations, "spec-bench": _first_turns, "hf": _any_rows}[options.dataset_name]
        found = read(rows, options, count_tokens)
    return _as_many(found, options.num_prompts, path, is_repeated=not options.no_oversample)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file: a JSON array, or one object per line.

    Raises:
        BenchError: It cannot be read, is too large, or holds something else.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BenchError(f"--dataset-path {path}: larger than {MAX_FILE_BYTES >> 30} GiB", exit_code=2)
        content = path.read_text(encoding="utf-8")
        is_array = content.lstrip()[:1] == "["
        rows = json.loads(content) if is_array else [json.loads(line) for line in content.splitlines() if line.strip()]
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}", exit_code=2) from error
    except (ValueError, RecursionError) as error:
        raise BenchError(f"--dataset-path {path}: is no JSON: {error}", exit_code=2) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BenchError(f"--dataset-path {path}: holds something else than objects", exit_code=2)
    return rows


def _file_of(path: Path, options: argparse.Namespace) -> Path:
    """The file, or the one of a folder that has the name of the split."""
    if path.is_dir():
        parts = [part for part in (options.hf_subset, options.hf_split) if part]
        files = [file for file in sorted(path.rglob("*.json*")) if all(part in str(file) for part in parts)]
        if len(files) != 1:
            raise BenchError(f"--dataset-path {path}: {len(files)} JSON files there fit; name one", exit_code=2)
        return files[0]
    if path.suffix in (".parquet", ".arrow"):
        raise BenchError(f"--dataset-path {path}: is read as JSON; export it as lines of JSON first", exit_code=2)
    if not path.is_file():
        raise BenchError(f"--dataset-path {path}: no such file; data sets are not downloaded", exit_code=2)
    return path


def _conversations(
    rows: Iterable[Mapping[str, Any]], options: argparse.Namespace, count_tokens: CountTokens
) -> Iterator[BenchRequest]:
    """The first question of each conversation, with the length of its answer."""
    for row in rows:
        turns = row.get("conversations") or row.get("conversation") or []
        texts = [turn.get("value", turn.get("content")) for turn in turns[:2] if isinstance(turn, dict)]
        question, answer = (*texts, None, None)[:2]
        if not isinstance(question, str) or not isinstance(answer, str):
            continue
        num_prompt, num_output = count_tokens(question), options.sharegpt_output_len or count_tokens(answer)
        is_short = num_prompt < MIN_TOKENS or (num_output < MIN_TOKENS and not options.sharegpt_output_len)
        if not is_short and num_prompt <= MAX_PROMPT_TOKENS and num_prompt + num_output <= MAX_TOKENS:
            yield BenchRequest(question, num_output)


def _first_turns(
    rows: Iterable[Mapping[str, Any]], options: argparse.Namespace, count_tokens: CountTokens
) -> Iterator[BenchRequest]:
    for row in rows:
        turns = row.get("turns")
        is_wanted = options.spec_bench_category in (None, row.get("category"))
        if is_wanted and isinstance(turns, list) and turns and isinstance(turns[0], str):
            yield BenchRequest(turns[0], options.spec_bench_output_len)


def _any_rows(
    rows: Iterable[Mapping[str, Any]], options: argparse.Namespace, count_tokens: CountTokens
) -> Iterator[BenchRequest]:
    """The first text of each row under one of the usual names."""
    num_output = options.hf_output_len or options.random_output_len
    for row in rows:
        turns = row.get("messages") or row.get("conversations") or row.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        texts = [first.get("value", first.get("content")) if isinstance(first, dict) else first]
        texts += [row.get(name) for name in _TEXT_FIELDS]
        text = next((text for text in texts if isinstance(text, str) and text), None)
        if text is not None:
            yield BenchRequest(text, num_output)


def _sonnets(
    path: Path, options: argparse.Namespace, count_tokens: CountTokens, rng: random.Random
) -> list[BenchRequest]:
    """Lines of a poem: the first ones shared by all prompts, the others drawn for each."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--dataset-path {path}: {error}", exit_code=2) from error
    if not lines:
        raise BenchError(f"--dataset-path {path}: holds no lines", exit_code=2)
    check_total(options.num_prompts * options.sonnet_input_len)
    num_task, num_per_line = count_tokens(POEM_TASK), sum(map(count_tokens, lines)) / len(lines)
    num_lines = round((options.sonnet_input_len - num_task) / num_per_line)
    num_shared = max(0, round((options.sonnet_prefix_len - num_task) / num_per_line))
    if num_lines < max(1, num_shared):
        raise BenchError("--sonnet-input-len: too short for the task and the prefix", exit_code=2)
    shared = "".join(lines[:num_shared])
    return [
        BenchRequest(
            POEM_TASK + shared + "".join(rng.choices(lines, k=num_lines - num_shared)), options.sonnet_output_len
        )
        for _ in range(options.num_prompts)
    ]


def _burst_requests(path: Path, ids: TokenSource) -> Iterator[BenchRequest]:
    """Random tokens of BurstGPT's lengths, from the rows of GPT-4 that were answered."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                num_output = int(row["Response tokens"])
                if row["Model"] == "GPT-4" and num_output > 0:
                    yield BenchRequest(ids.draw(min(int(row["Request tokens"]), 1 << 20) or 1), num_output)
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}", exit_code=2) from error
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"--dataset-path {path}: is no table of BurstGPT: {error}", exit_code=2) from error


def _as_many(found: Iterable[BenchRequest], num_prompts: int, path: Path, *, is_repeated: bool) -> list[BenchRequest]:
    requests: list[BenchRequest] = []
    for request in found:
        if len(requests) == num_prompts:
            break
        requests.append(request)
    if not requests:
        raise BenchError(f"--dataset-path {path}: holds no request of this kind", exit_code=2)
    num_missing = num_prompts - len(requests) if is_repeated else 0
    return requests + [requests[index % len(requests)] for index in range(num_missing)]
