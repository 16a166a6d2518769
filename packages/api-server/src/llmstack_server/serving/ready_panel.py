"""Lines of the log and panel of a terminal for a server that is ready."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from typing import TYPE_CHECKING, NamedTuple

from llmstack_server.options.config import HTTPConfig
from llmstack_types.log_lines import log_format_in_use

if TYPE_CHECKING:
    from llmstack_server.state.server_state import ServerState

logger = logging.getLogger(__name__)

_ANY_TO_LOCAL = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}


class ReadySummary(NamedTuple):
    """A server that is ready, in words.

    Attributes:
        text: The model, its data type and its device.
        is_generative: Whether it completes text; else it computes vectors.
        transcriber: The name of a model that transcribes, which takes files of sound alone; empty for every other.
    """

    text: str
    is_generative: bool = True
    transcriber: str = ""


def ready_summary(state: ServerState) -> ReadySummary:
    """The summary of this process's server."""
    ready = state.ready
    device = "" if ready is None else f", {ready.dtype} on {ready.device}, up to {ready.max_model_len} tokens"
    name, engine = state.served_model_name, state.opened_engine
    transcribes = engine is not None and engine.speech is not None
    is_generative = ready is None or ready.is_generative
    return ReadySummary(f"model {name}{device}", is_generative, name if transcribes else "")


def log_ready(address: str, total_s: float, summary: ReadySummary, stages: dict[str, float], http: HTTPConfig) -> None:
    """Logs the address, and the seconds of each stage of the start below it; a terminal gets what to do next, too."""
    table = "\n".join(f"  {stage:<32} {seconds:7.3f} s" for stage, seconds in stages.items())
    logger.info("llmstack is ready on %s after %.1f s (%s)\n%s", address, total_s, summary.text, table)
    if sys.stderr.isatty() and log_format_in_use() == "text":
        sys.stderr.write(ready_panel(address, summary, http, has_color="NO_COLOR" not in os.environ))


def ready_panel(address: str, summary: ReadySummary, http: HTTPConfig, *, has_color: bool) -> str:
    """The pages of a server that is ready, and a request to paste, as they are on this machine."""
    bold, accent, plain = ("\x1b[1m", "\x1b[36m", "\x1b[0m") if has_color else ("", "", "")
    for any_host, local in _ANY_TO_LOCAL.items():
        address = address.replace(any_host, local)
    lines = [f"{bold}── llmstack: {summary.text} {'─' * 8}{plain}"]
    if http.uds is None:
        lines += [f"  {name:<9}{accent}{address}{path}{plain}" for name, path in _pages(summary, http)]
    return "\n".join([*lines, "", _request(address, summary, http), "", ""])


def _pages(summary: ReadySummary, http: HTTPConfig) -> list[tuple[str, str]]:
    chat = [("chat", "/")] if http.has_chat_page and summary.is_generative else []
    live = [("live", "/live")] if http.has_chat_page else []
    docs = [("docs", "/docs")] if http.has_docs else []
    return [*chat, ("API", "/v1"), *live, *docs, ("metrics", "/metrics")]


def _request(address: str, summary: ReadySummary, http: HTTPConfig) -> str:
    path, given = "/v1/completions", _json_body('{"prompt": "Once upon a time", "max_tokens": 40}')
    if summary.transcriber:
        model = shlex.quote(f"model={summary.transcriber}")
        path, given = "/v1/audio/transcriptions", f"-F file=@speech.wav -F {model}"
    elif not summary.is_generative:
        path, given = "/v1/embeddings", _json_body('{"input": "Once upon a time"}')
    where = f"{address}{path}" if http.uds is None else f"--unix-socket {http.uds} http://localhost{path}"
    key = ' -H "Authorization: Bearer $LLMSTACK_API_KEY"' if http.api_keys else ""
    return f"curl {where}{key} {given}"


def _json_body(text: str) -> str:
    return f"-H 'Content-Type: application/json' -d '{text}'"
