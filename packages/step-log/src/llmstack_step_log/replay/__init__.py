"""Replay of a step log without a model.

It proves the decisions of the run, or compares them with those of other settings.
"""

from llmstack_step_log.replay.derive import Decision, DecisionsDifferError, derive_decisions
from llmstack_step_log.replay.verify import ReplayReport, verify

__all__ = ["Decision", "DecisionsDifferError", "ReplayReport", "derive_decisions", "verify"]
