"""A search for the settings that meet a target, on the requests of a recorded run."""

from llmstack_insight.tune.figures import Figures, figures_of
from llmstack_insight.tune.search import Candidate, SearchLimits, Space, search
from llmstack_insight.tune.target import Target, TargetError, parse_target

__all__ = [
    "Candidate",
    "Figures",
    "SearchLimits",
    "Space",
    "Target",
    "TargetError",
    "figures_of",
    "parse_target",
    "search",
]
