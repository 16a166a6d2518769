"""Findings about a start: model, options, port, state folder, hub."""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmstack_command.discovery import find_command
from llmstack_command.doctor.finding import Finding, from_sentence, package_module
from llmstack_command.errors import CommandLineError
from llmstack_command.parser import CommandParser

START_MODULE = "llmstack_server.commands.start_facts"
HUB_TIMEOUT_S = 2.0


def start(words: Sequence[str]) -> Iterator[Finding]:
    """The server's own findings about a start with these words after `llmstack serve`; nothing is started."""
    source = find_command("serve")
    if source is None:
        return  # the finding on packages says so
    command = source.load()
    parser = CommandParser(prog="llmstack serve", description=command.help)
    command.add_arguments(parser)
    checks = package_module(START_MODULE)
    if checks is None:
        return
    try:
        namespace = parser.parse_line(list(words), None)
    except CommandLineError as error:
        yield from (from_sentence("start", "problem", line) for line in str(error).splitlines())
        return
    with _without_log():
        facts = list(checks.start_facts(namespace))
    yield from (from_sentence(name, state, sentence) for name, state, sentence in facts)


@contextmanager
def _without_log() -> Iterator[None]:
    """Silences the log: its lines are in the findings already."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class Hub:
    """The Hugging Face hub: asked in the background, since even the look-up of its name may hang."""

    def __init__(self, timeout_s: float = HUB_TIMEOUT_S) -> None:
        self._answer = ""
        self._timeout_s = timeout_s
        self._constants: Any | None = package_module("huggingface_hub.constants")
        # A daemon: a name server that does not answer must not keep the command from ending.
        address = str(getattr(self._constants, "ENDPOINT", ""))
        self._thread = threading.Thread(target=self._ask, args=(address,), daemon=True)
        if self._constants is not None and not self._constants.HF_HUB_OFFLINE:
            self._thread.start()

    def findings(self) -> Iterator[Finding]:
        """Whether it answered, at most `timeout_s` from now."""
        remedy = "for models of the hub only: check the network, a proxy or HF_ENDPOINT"
        if self._constants is None:
            yield Finding("hub", "note", "huggingface-hub is not installed", "pip install huggingface-hub")
        elif self._constants.HF_HUB_OFFLINE:
            yield Finding("hub", "note", "not asked: HF_HUB_OFFLINE is set", "unset it to download models")
        else:
            self._thread.join(self._timeout_s)
            if self._answer == "yes":
                yield Finding("hub", "ok", f"{self._constants.ENDPOINT} answers")
            else:
                why = self._answer or f"no answer within {self._timeout_s:g} s"
                yield Finding("hub", "note", f"{self._constants.ENDPOINT} cannot be reached ({why})", remedy)

    def _ask(self, address: str) -> None:
        if not address.startswith(("http://", "https://")):
            self._answer = "HF_ENDPOINT is not an http address"
            return
        request = urllib.request.Request(f"{address}/api/models?limit=1", method="HEAD")  # noqa: S310 - checked above
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):  # noqa: S310 - checked above
                self._answer = "yes"
        except urllib.error.HTTPError as error:
            self._answer = "yes" if error.code < 500 else f"HTTP {error.code}"
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            self._answer = str(getattr(reason, "strerror", None) or reason)[:100]
