"""The results of simulated sessions of agents, as JSON and as text."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmstack_insight.simulate.cache_policies import PolicyResult
from llmstack_insight.simulate.report import Report, percentiles

TURN_GROUPS = (1, 5, 20)
"""The last turn of each group of turns; the last group has all later ones."""


@dataclass(slots=True)
class AgentReport:
    """The figures of simulated sessions.

    Each token of a prompt counts once: as found in the cache, or as computed for one of three causes.

    Attributes:
        timing: Of all requests together.
        num_sessions: Without subagents.
        num_needed_blocks: Blocks that hold every context of a session that is open, at the time with most of them.
        memory_share: The blocks of the cache over those needed; None where they were given, or nothing is evicted.
        num_found_tokens: Found in the cache.
        num_new_tokens: Computed, since nothing had computed them before.
        num_rounded_tokens: Computed again, since only full blocks are found, and the last token never is.
        num_again_tokens: Computed again, since the cache had evicted them.
        ttft_s: By group of turns, from the arrival to the first token.
        policies: What other orders of eviction find, of as many blocks; see `cache_policies.replay_cache`.
    """

    timing: Report
    num_sessions: int = 0
    num_needed_blocks: int = 0
    memory_share: float | None = None
    num_found_tokens: int = 0
    num_new_tokens: int = 0
    num_rounded_tokens: int = 0
    num_again_tokens: int = 0
    ttft_s: list[array[float]] = field(default_factory=lambda: [array("d") for _ in (*TURN_GROUPS, None)])
    policies: Mapping[str, PolicyResult] = field(default_factory=dict)

    def note_turn(
        self, turn: int, ttft_s: float, num_prompt_tokens: int, num_known: int, num_findable: int, num_found: int
    ) -> None:
        """A request has begun; turns count from 0.

        `num_known`: The tokens at the beginning of its prompt that were computed before.
        `num_findable`: Of these, what a cache without limits finds.
        `num_found`: What this one has found.
        """
        self.num_found_tokens += num_found
        self.num_new_tokens += num_prompt_tokens - num_known
        self.num_rounded_tokens += num_known - num_findable
        self.num_again_tokens += num_findable - num_found
        self.ttft_s[sum(turn >= last for last in TURN_GROUPS)].append(ttft_s)

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt tokens of all requests that have begun."""
        return self.num_found_tokens + self.num_new_tokens + self.num_rounded_tokens + self.num_again_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found."""
        return self.num_found_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data: that of all requests, and `agents`; times in seconds."""
        return self.timing.to_json() | {
            "agents": {
                "sessions": self.num_sessions,
                "needed_blocks": self.num_needed_blocks,
                "memory_share": self.memory_share,
                "hit_rate": self.hit_rate,
                "tokens": {
                    "found": self.num_found_tokens,
                    "new": self.num_new_tokens,
                    "rounded": self.num_rounded_tokens,
                    "evicted": self.num_again_tokens,
                },
                "ttft_s": {name: percentiles(values) for name, values in zip(_groups(), self.ttft_s, strict=True)},
                "policies": {
                    name: {"found_tokens": result.num_found_tokens, "evicted_tokens": result.num_again_tokens}
                    for name, result in self.policies.items()
                },
            }
        }

    def to_text(self) -> str:
        """Lines for a reader: those of all requests, and those of the sessions."""
        share = "" if self.memory_share is None else f", the cache has {100 * self.memory_share:.3g} % of them"
        lines = {
            "sessions": f"{self.num_sessions}, at most {self.num_needed_blocks} blocks needed at the same time{share}",
            "found": f"{100 * self.hit_rate:.2f} % of the prompts: {self.num_found_tokens} tokens",
            "computed": f"{self.num_new_tokens} new tokens, {self.num_again_tokens} again that were evicted, "
            f"{self.num_rounded_tokens} again beside full blocks",
        }
        for name, result in self.policies.items():
            lines[name] = f"{result.num_again_tokens} tokens again that were evicted, one request after the other"
        for name, values in zip(_groups(), self.ttft_s, strict=True):
            spread = percentiles(values)
            if values:
                lines[f"turn {name}"] = "TTFT " + ", ".join(f"{key} {value:.4g} s" for key, value in spread.items())
        return self.timing.to_text() + "\n" + "\n".join(f"{name:<13} {text}" for name, text in lines.items())


def _groups() -> list[str]:
    """The names of the groups of turns."""
    firsts = [1, *(last + 1 for last in TURN_GROUPS)]
    names = [
        f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, TURN_GROUPS, strict=False)
    ]
    return [*names, f"{firsts[-1]}+"]
