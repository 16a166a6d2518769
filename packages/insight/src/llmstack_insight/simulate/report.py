"""The results of a simulation, as JSON and as text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from llmstack_insight.simulate.predictions import PredictionErrors

PERCENTILES = (50, 90, 99)


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """`p50`, `p90` and `p99` by nearest rank: each is one of the values; None where there are none."""
    ordered = sorted(values)
    if not ordered:
        return {f"p{percent}": None for percent in PERCENTILES}
    return {f"p{percent}": ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENTILES}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same trace with one cache, and with replicas that take turns.

    Attributes:
        num_one_cache_hit_tokens: Found in one cache as large as all together, each prompt after the one before.
        round_robin_p99_ttft_s: The p99 with replicas that take turns.
        round_robin_hit_tokens: The hit tokens of round robin.
    """

    num_one_cache_hit_tokens: int
    round_robin_p99_ttft_s: float | None
    round_robin_hit_tokens: int


@dataclass(slots=True)
class Report:
    """Counters and samples of one simulation.

    Attributes:
        num_refused: Requests that can never fit; they count nowhere else.
        num_hit_tokens: Prompt tokens found in the cache when a request was first admitted.
        max_waiting: Most requests that had arrived and not begun.
        queue_s: Per request, from its arrival to its first step.
        ttft_s: Per request, from its arrival to its first token.
        hit_tokens: Per request, in the order of `ttft_s`, the tokens of its prompt that the cache had.
        itl_s: Per token but the first, since the one before.
        num_computed_tokens: By replica, the tokens of prompts that it did not find in its cache.
        compared: Results of other policies for the same trace; None where there is one replica.
        predictions: Errors of the predicted first tokens; None if nothing was predicted.
    """

    num_requests: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_steps: int = 0
    max_waiting: int = 0
    max_running: int = 0
    num_blocks: int = 0
    block_size: int = 0
    ttft_target_s: float = 0.0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    queue_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    hit_tokens: array[int] = field(default_factory=lambda: array("q"))
    itl_s: array[float] = field(default_factory=lambda: array("d"))
    cost_model: Any = None
    num_replicas: int = 1
    routing: str = ""
    num_computed_tokens: list[int] = field(default_factory=list)
    compared: Comparison | None = None
    predictions: PredictionErrors | None = None

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the cache."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """The most that a replica computed of the prompts, over the mean of all."""
        total = sum(self.num_computed_tokens)
        return max(self.num_computed_tokens) * len(self.num_computed_tokens) / total if total else 1.0

    @property
    def share_of_one_cache(self) -> float | None:
        """Hit tokens over those of one cache as large as all together; None where that is unknown or finds none."""
        compared = self.compared
        if compared is None or not compared.num_one_cache_hit_tokens:
            return None
        return self.num_hit_tokens / compared.num_one_cache_hit_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        num_in_time = sum(ttft_s <= self.ttft_target_s for ttft_s in self.ttft_s)
        return {
            "requests": self.num_requests,
            "refused": self.num_refused,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "hit_tokens": self.num_hit_tokens,
            "hit_rate": self.hit_rate,
            "preemptions": self.num_preemptions,
            "evictions": self.num_evictions,
            "steps": self.num_steps,
            "max_waiting": self.max_waiting,
            "max_running": self.max_running,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "queue_s": percentiles(self.queue_s),
            "ttft_s": percentiles(self.ttft_s),
            "itl_s": percentiles(self.itl_s),
            "goodput": {
                "ttft_target_s": self.ttft_target_s,
                "requests": num_in_time,
                "share": num_in_time / self.num_requests if self.num_requests else 0.0,
                "requests_per_s": num_in_time / self.simulated_s if self.simulated_s else 0.0,
            },
            "simulated_s": self.simulated_s,
            "wall_s": self.wall_s,
            "simulated_s_per_wall_s": self.simulated_s / self.wall_s if self.wall_s else 0.0,
            "cost_model": asdict(self.cost_model) if self.cost_model is not None else None,
            "replicas": self._replicas_to_json() if self.num_replicas > 1 else None,
            "predictions": None if self.predictions is None else self.predictions.to_json(),
        }

    def _replicas_to_json(self) -> dict[str, Any]:
        compared = self.compared
        return {
            "count": self.num_replicas,
            "routing": str(self.routing),
            "computed_tokens": self.num_computed_tokens,
            "imbalance": self.imbalance,
            "one_cache_hit_tokens": compared and compared.num_one_cache_hit_tokens,
            "share_of_one_cache": self.share_of_one_cache,
            "round_robin_hit_tokens": compared and compared.round_robin_hit_tokens,
            "round_robin_p99_ttft_s": compared and compared.round_robin_p99_ttft_s,
        }

    def _replicas_to_text(self) -> str:
        text = f"{self.num_replicas} by {self.routing}, the busiest computed {self.imbalance:.2f} times the mean"
        share, compared = self.share_of_one_cache, self.compared
        if share is not None:
            text += f", {100 * share:.1f} % of the hits of one cache as large"
        if compared is not None:
            text += f"; round robin: {compared.round_robin_hit_tokens} tokens hit, "
            text += f"TTFT p99 {_seconds(compared.round_robin_p99_ttft_s)}"
        return text

    def to_text(self) -> str:
        """Lines for a reader."""
        named = self.to_json()
        goodput = named["goodput"]
        pool = f"{self.num_blocks} blocks of {self.block_size}"
        goodput_text = f"{goodput['requests_per_s']:.3f} requests/s, {100 * goodput['share']:.1f} % of all"
        lines = {
            "requests": f"{self.num_requests} in {self.num_steps} steps, {self.num_refused} refused",
            "tokens": f"{self.num_prompt_tokens} prompt, {self.num_output_tokens} output",
            "prefix cache": f"{self.num_hit_tokens} tokens hit, {100 * self.hit_rate:.2f} % of the prompts",
            "pool": f"{pool}, {self.num_evictions} evictions, {self.num_preemptions} preemptions",
            "queue": f"{_spread(named['queue_s'])}, {self.max_waiting} waiting at most",
            "TTFT": _spread(named["ttft_s"]),
            "ITL": _spread(named["itl_s"]),
            "goodput": f"{goodput_text} have their first token within {self.ttft_target_s:g} s",
            "time": f"{self.simulated_s:.1f} s simulated in {self.wall_s:.1f} s",
        }
        if self.num_replicas > 1:
            lines["replicas"] = self._replicas_to_text()
        if self.predictions is not None:
            lines["predictions"] = self.predictions.to_text()
        return "\n".join(f"{name:<13} {text}" for name, text in lines.items())


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} s"


def _spread(values: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.4g} s" if value is not None else f"{name} -" for name, value in values.items())
