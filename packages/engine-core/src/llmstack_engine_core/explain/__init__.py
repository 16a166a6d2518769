"""Where the time of a request went, from the steps of an engine core."""

from llmstack_engine_core.explain.explanation import Explanation, Limits, UnknownRequestError, explain

__all__ = ["Explanation", "Limits", "UnknownRequestError", "explain"]
