"""The subcommand `llmstack explain`.

`llmstack --help` imports it, so it imports little.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmstack_insight.explain import Explanation
    from llmstack_insight.explain.prefixes import TextOf
    from llmstack_insight.explain.workload import Arrival
    from llmstack_step_log import Run
    from llmstack_types import StepRecording

DEFAULT_URL = "http://localhost:8000"
API_KEY_VARIABLES = ("LLMSTACK_API_KEY", "OPENAI_API_KEY")
TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 4 << 20
# A step of 64 rows takes about 10 kB while it is kept.
MAX_STEPS = 50_000
# The replay of so many takes some seconds.
LONG_REPLAY_STEPS = 10_000
# A package above this one, so it is named and not imported.
TOKENIZER_MODULE = "llmstack_llm.text.tokenizer"


class ExplainError(Exception):
    """There is no explanation; one line."""


class ExplainCommand:
    """`llmstack explain REQUEST [--log FILE | --url URL]`."""

    name = "explain"
    help = "show where the time of a request went"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags of `llmstack explain`."""
        parser.add_argument("request", metavar="REQUEST", help="the id in the answer, such as chatcmpl-…")
        source = parser.add_mutually_exclusive_group()
        source.add_argument("--log", type=Path, metavar="FILE", help="what `llmstack serve --record-steps FILE` wrote")
        source.add_argument(
            "--url", default=DEFAULT_URL, metavar="URL", help=f"ask a running server (default: {DEFAULT_URL})"
        )
        parser.add_argument("--api-key", metavar="KEY", help="prefer LLMSTACK_API_KEY: process lists show flags")
        parser.add_argument(
            "--explain-text",
            type=Path,
            metavar="FOLDER",
            help="with --log, also show tokens and text where prompts of one key part, by the tokenizer in the model's "
            "FOLDER (default: no text is shown)",
        )
        parser.add_argument("--json", action="store_true", help="print the figures, too, as one JSON object")

    def run(self, namespace: argparse.Namespace) -> int:
        """0: explained; 1: the request is not known, or the source cannot be read."""
        try:
            if namespace.log is not None:
                text_of = None if namespace.explain_text is None else _text_by(namespace.explain_text)
                found = _plain(_from_log(namespace.log, namespace.request, text_of))
            elif namespace.explain_text is not None:
                raise ExplainError("--explain-text needs --log: a running server is started with a flag of that name")
            else:
                found = _from_server(namespace.url, namespace.request, namespace.api_key)
        except ExplainError as error:
            sys.stderr.write(f"llmstack explain: error: {error}\n")
            return 1
        text = json.dumps(found, indent=2) if namespace.json else "\n".join(map(str, found["sentences"]))
        sys.stdout.write(text + "\n")
        return 0


def _plain(found: Explanation) -> dict[str, Any]:
    return {"id": found.request_id, "sentences": found.sentences, "facts": found.facts}


def _text_by(folder: Path) -> TextOf:
    """Decodes by the tokenizer in a folder."""
    import importlib

    from llmstack_types import LLMStackError

    try:
        tokenizer = importlib.import_module(TOKENIZER_MODULE).load_tokenizer(folder)
    except ImportError as error:
        raise ExplainError(f"--explain-text needs the package llmstack-llm: {error}") from error
    except (LLMStackError, OSError) as error:
        raise ExplainError(f"--explain-text: {' '.join(str(error).split())[:200]}") from error

    def text_of(token_ids: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(token_ids))
        except OverflowError as error:
            raise ExplainError("--explain-text: the log has tokens that no tokenizer knows") from error

    return text_of


def _from_log(path: Path, request_id: str, text_of: TextOf | None = None) -> Explanation:
    from llmstack_insight.explain import first_names
    from llmstack_insight.steps_of_log import STEPS_BEFORE
    from llmstack_step_log import StepLogError
    from llmstack_step_log.seek import run_with, steps_before_damage

    try:
        with run_with(path, first_names(request_id), STEPS_BEFORE) as run:
            if run is not None:
                _tell_of_replay(path, run)
                made = _from_run(run, request_id, text_of)
                if made is not None:
                    return made
        num_steps = steps_before_damage(path)
    except StepLogError as error:
        raise ExplainError(f"{path}: {error}") from error
    without = f"{path} has no request {request_id[:128]!r}"
    if num_steps is not None:
        raise ExplainError(
            f"{without}; the log is cut or damaged at step {num_steps}, and the request may lie behind it"
        )
    raise ExplainError(without)


def _tell_of_replay(path: Path, run: Run) -> None:
    """Says on stderr that a long replay begins."""
    from llmstack_step_log.reader import RecordedRun

    if isinstance(run, RecordedRun) and run.last.num_steps >= LONG_REPLAY_STEPS:
        text = f"{path} has no snapshots: up to {run.last.num_steps} steps are replayed, which may take a minute"
        sys.stderr.write(f"llmstack explain: {text}\n")


def _from_run(run: Run, request_id: str, text_of: TextOf | None) -> Explanation | None:
    """The explanation of the last part of an answer; None where the run has none."""
    from llmstack_insight.explain import (
        Limits,
        add_deadline,
        add_estimates,
        add_parts,
        add_prefix_match,
        explain,
        last_part,
        part_matcher,
        parts_in,
        workload_of_log,
    )
    from llmstack_insight.steps_of_log import steps_of_log

    scheduler, cache = run.header.configs()
    log = steps_of_log(run, MAX_STEPS, part_matcher(request_id))
    parts = parts_in(log, request_id)
    if not parts:
        return None
    name, _ = last_part(log, parts)
    limits = Limits(
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_loras, scheduler.max_prefill_tokens
    )
    made = explain(log, name, limits, parts=parts)
    made.sentences.extend(run.notes)
    if run.truncated_at is not None:
        made.facts["damaged_at"] = run.truncated_at
        made.sentences.append(f"The log is truncated or damaged after byte {run.truncated_at}: this is of before.")
    add_prefix_match(made, run, log, cache, text_of)
    add_deadline(made, log, _arrival(run, log, name), scheduler, cache)
    add_estimates(made, log, workload_of_log(run, log, name), scheduler, cache)
    if len(parts) > 1:
        add_parts(made, parts)
    return made


def _arrival(run: Run, log: StepRecording, name: str) -> Arrival | None:
    """The request with its prompt, as a log has it."""
    from llmstack_insight.explain.workload import Arrival

    requests, _ = run.requests_up_to(name, 1)
    found = next((row.num_computed_tokens for step in log.steps for row in step.rows if row.request_id == name), 0)
    return Arrival(requests[0], 0.0, num_found_tokens=found) if requests else None


def _from_server(url: str, request_id: str, api_key: str | None) -> dict[str, Any]:
    import http.client
    from urllib.parse import quote, urlsplit

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ExplainError(f"--url: {url[:80]!r} is not a URL such as {DEFAULT_URL}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    key = api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    try:
        connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        try:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(
                "GET", f"{prefix}/v1/requests/{quote(request_id, safe='')}/explanation?estimates=true", headers=headers
            )
            answer = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ExplainError(f"{url[:80]} gives no answer: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("sentences"), list):
        error_object = answer.get("error") if isinstance(answer, dict) else None
        message = error_object.get("message") if isinstance(error_object, dict) else None
        raise ExplainError(str(message or f"{url[:80]} is not a server that explains requests"))
    return answer
