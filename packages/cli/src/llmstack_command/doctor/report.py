"""The doctor's report: all findings in their order, as text or JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from llmstack_command.doctor import machine, reach, software
from llmstack_command.doctor.finding import Finding, guarded

Find = Callable[[], Iterator[Finding]]
_MARKS = {"ok": "ok", "note": "note", "problem": "FAIL"}


def collect(words: Sequence[str]) -> list[Finding]:
    """All findings; `words` stand after `llmstack serve`."""
    hub = reach.Hub()
    gpu = _Background("GPU", machine.gpu)  # the driver's tool takes up to seconds
    own: dict[str, Find] = {
        "system": machine.system,
        "processor": machine.processor,
        "caches": machine.caches,
        "memory": machine.memory,
        "packages": software.packages,
        "torch": machine.torch,
        "native kernels": software.native_kernels,
        "bytecode": software.bytecode,
        "Ray": software.ray,
        "talking model": software.model,
        "start": lambda: reach.start(words),
    }
    found = {name: guarded(name, find) for name, find in own.items()}
    order = (*list(own)[:4], "GPU", *list(own)[4:], "hub")
    found |= {"GPU": gpu.findings(), "hub": guarded("hub", hub.findings)}
    return [finding for name in order for finding in found[name]]


def render(findings: Sequence[Finding]) -> str:
    """The report as text: a line each, its remedy below it, and the verdict."""
    width = max(len(finding.name) for finding in findings)
    lines = [line for finding in findings for line in _lines(finding, width)]
    num_problems = sum(finding.state == "problem" for finding in findings)
    things = "1 thing prevents" if num_problems == 1 else f"{num_problems} things prevent"
    verdict = f"{things} `llmstack serve`." if num_problems else "`llmstack serve` can start."
    return "\n".join([*lines, "", verdict])


def _lines(finding: Finding, width: int) -> Iterator[str]:
    yield f"{_MARKS[finding.state]:<4}  {finding.name:<{width}}  {finding.text}"
    if finding.remedy:
        yield f"{'':<{4 + 2 + width + 2}}-> {finding.remedy}"


class _Background:
    """Findings that are collected in a thread."""

    def __init__(self, name: str, find: Find) -> None:
        self._found: list[Finding] = []
        self._thread = threading.Thread(target=lambda: self._found.extend(guarded(name, find)), daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        """Waits for them; what is run there has a time limit of its own."""
        self._thread.join()
        return self._found
