"""Drawings of a schedule: requests as lanes over steps, live or from a step log."""

from llmstack_insight.timeline.page import timeline_page
from llmstack_insight.timeline.timeline import timeline_of

__all__ = ["timeline_of", "timeline_page"]
