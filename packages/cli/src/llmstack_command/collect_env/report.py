"""The report of `collect-env`: its sections and their layout."""

from __future__ import annotations

import os

from llmstack_command.collect_env.machine import cpu_facts, gpu_facts, limit_facts, system_facts
from llmstack_command.collect_env.software import (
    import_facts,
    package_versions,
    python_facts,
    relevant_variables,
    start_probe,
)

Sections = dict[str, dict[str, str]]


def collect() -> Sections:
    """The facts by section, each as one line of text."""
    probe = start_probe()  # imports PyTorch in another process meanwhile
    return {
        "system": system_facts(),
        "processor": cpu_facts(),
        "limits": limit_facts(),
        "gpu": gpu_facts(),
        "python": python_facts(),
        "packages": package_versions(),
        "torch and kernels": import_facts(probe),
        "environment variables": relevant_variables(os.environ),
    }


def render(sections: Sections) -> str:
    """The report as text."""
    return "\n\n".join(_render_section(title, facts) for title, facts in sections.items())


def _render_section(title: str, facts: dict[str, str]) -> str:
    width = max((len(name) for name in facts), default=0)
    lines = [f"  {name:<{width}}  {value}" for name, value in facts.items()] or ["  (none)"]
    return "\n".join([title, *lines])
