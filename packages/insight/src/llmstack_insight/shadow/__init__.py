"""Another control plane on the live inputs, without effect.

It runs in a process of its own.
"""

from llmstack_insight.shadow.feed import ShadowFeed, start_shadow
from llmstack_insight.shadow.shadow import Shadow

__all__ = ["Shadow", "ShadowFeed", "start_shadow"]
