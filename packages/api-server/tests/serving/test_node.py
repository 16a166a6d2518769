"""The start of a machine that hosts ranks only."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmstack_llm.model import preflight
from llmstack_llm.testing import write_model_folder
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving import hosts


def test_what_a_runner_says_of_a_model_ends_the_start_with_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as native kernels that are older than their sources."""

    class Agent(ModuleType):
        def NodeAgent(self, *arguments: Any) -> Any:
            raise ValueError("The native kernels are older than their sources.")

    monkeypatch.setitem(sys.modules, hosts._AGENT, Agent(hosts._AGENT))
    monkeypatch.setattr(preflight, "check_model_runs", lambda config: None)
    config = ServeConfig(str(write_model_folder(tmp_path)), ())
    with pytest.raises(ServeError, match=r"^The native kernels are older than their sources\.$"):
        hosts.run_node(config)
