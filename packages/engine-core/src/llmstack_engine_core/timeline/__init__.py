"""Drawings of a schedule: requests as lanes over steps, live or from a step log."""

from llmstack_engine_core.timeline.page import timeline_page
from llmstack_engine_core.timeline.timeline import timeline_of

__all__ = ["timeline_of", "timeline_page"]
