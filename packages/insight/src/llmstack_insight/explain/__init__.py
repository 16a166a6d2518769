"""Explanations of the time of a request, from the steps of an engine core."""

from llmstack_insight.explain.answers import first_names, last_part, part_matcher, parts_in, parts_of
from llmstack_insight.explain.deadlines import add_deadline
from llmstack_insight.explain.estimates import add_estimates
from llmstack_insight.explain.explanation import Explanation, UnknownRequestError, add_parts, explain
from llmstack_insight.explain.prefixes import add_lost_block, add_prefix_match, insert_on_prefix
from llmstack_insight.explain.running import add_estimates_of_engine
from llmstack_insight.explain.waits import Limits
from llmstack_insight.explain.workload import workload_of_log, workload_of_steps

__all__ = [
    "Explanation",
    "Limits",
    "UnknownRequestError",
    "add_deadline",
    "add_estimates",
    "add_estimates_of_engine",
    "add_lost_block",
    "add_parts",
    "add_prefix_match",
    "explain",
    "first_names",
    "insert_on_prefix",
    "last_part",
    "part_matcher",
    "parts_in",
    "parts_of",
    "workload_of_log",
    "workload_of_steps",
]
