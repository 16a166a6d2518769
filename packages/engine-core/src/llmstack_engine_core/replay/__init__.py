"""Derives a recorded run's decisions again, without a model: proves them, or compares them with other rules'."""

from llmstack_engine_core.replay.derive import Decision, DecisionsDifferError, derive_decisions
from llmstack_engine_core.replay.verify import ReplayReport, verify

__all__ = ["Decision", "DecisionsDifferError", "ReplayReport", "derive_decisions", "verify"]
