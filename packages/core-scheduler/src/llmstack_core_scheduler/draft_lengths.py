"""Numbers of drafts per row: as many as are expected to repay their cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmstack_core_scheduler.draft_costs import draft_costs
from llmstack_core_scheduler.speculative_config import SpeculativeConfig

_NUM_REMEMBERED = 32
"""Drafts that an acceptance rate remembers; when there are more, the weight of all of them is halved."""

_PRIOR_OF_TEXT = (1, 2)
_PRIOR_OF_MODEL = (4, 5)
"""Drafts that count as right, of so many, before any was verified: by looking text up, and by a model."""

_NUM_STEPS_WITHOUT = 16
"""Steps without drafts after which a request's rate is half forgotten, so that drafts are tried again."""


LEAST_GAIN: Final = 1.05
"""The least expected gain of a step by drafts whose costs were measured: below it, an error of either would lose."""


class AcceptanceRate:
    """How often the drafts of one request were right, of late.

    Attributes:
        num_tried: Drafts that were verified. After a wrong one the others are not.
        num_right: Drafts that were right.
    """

    __slots__ = ("_num_steps_without", "_prior", "num_right", "num_tried")

    def __init__(self, prior: tuple[int, int] = _PRIOR_OF_TEXT) -> None:
        """`prior`: Drafts that count as right, and as tried, besides the verified ones."""
        self._prior = prior
        self.num_tried = 0
        self.num_right = 0
        self._num_steps_without = 0

    def note_verified(self, num_drafts: int, num_right: int) -> None:
        """Counts the drafts of one row, the first `num_right` of which were right."""
        self._num_steps_without = 0
        self.num_tried += min(num_right + 1, num_drafts)
        self.num_right += num_right
        if self.num_tried > _NUM_REMEMBERED:
            self._halve()

    def note_step_without(self) -> None:
        """Counts a step in which drafts were not worth their cost."""
        self._num_steps_without += 1
        if self._num_steps_without == _NUM_STEPS_WITHOUT:
            self._num_steps_without = 0
            self._halve()

    def max_length(self, least_chance: float, limit: int) -> int:
        """The most drafts in a row of which the last is right with a chance of at least `least_chance`."""
        rate = chance = (self.num_right + self._prior[0]) / (self.num_tried + self._prior[1])
        length = 0
        while length < limit and chance >= least_chance:
            length += 1
            chance *= rate
        return length

    def best_length(self, costs: Sequence[float]) -> int:
        """The drafts with the largest gain, tokens over time, if that is at least `LEAST_GAIN`; `costs` by number."""
        rate = chance = (self.num_right + self._prior[0]) / (self.num_tried + self._prior[1])
        num_tokens, length, best = 1.0, 0, LEAST_GAIN
        for number in range(1, len(costs)):
            num_tokens += chance
            chance *= rate
            if num_tokens >= best * costs[number]:
                length, best = number, num_tokens / costs[number]
        return length

    def num_expected(self, num_drafts: int) -> float:
        """The tokens that a row with so many drafts is expected to give."""
        rate = (self.num_right + self._prior[0]) / (self.num_tried + self._prior[1])
        return sum(rate**place for place in range(num_drafts + 1))

    def _halve(self) -> None:
        self.num_tried //= 2
        self.num_right //= 2


class DraftLengths:
    """Bounds the drafts of each row by the acceptance rate of its request and by the cost of a token.

    A draft is worth its cost if the tokens that it adds to the step, over those that the step has without it, exceed
    what it adds to the step's time. A step of n tokens takes 1 + `token_cost` n, in units of its constant part, and its
    r rows give r tokens. So a draft that is right with the chance p is worth it if p / r >= `token_cost` / (1 +
    `token_cost` n). A model that makes the drafts adds `draft_cost` to the step's time for one more draft of all rows.
    Nothing here depends on a clock.

    For a native variant whose costs were measured, the table of `draft_costs` is in place of these constants.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._token_cost = config.token_cost
        self._draft_cost = config.draft_cost
        self._max_num_step_tokens = config.max_num_step_tokens
        self._prior = _PRIOR_OF_MODEL if config.is_by_model else _PRIOR_OF_TEXT
        self._rates: dict[str, AcceptanceRate] = {}
        self._variant = "" if config.is_by_model else config.variant
        self._step_bytes = config.step_bytes
        self._key_to_costs: dict[tuple[int, int], Sequence[float]] = {}
        self._max_num_drafts = config.num_speculative_tokens
        self._num_rows_to_try: dict[int, bool] = {}

    def may_have_drafts(self, num_rows: int) -> bool:
        """Whether a step of so many rows may have drafts; False where first ones would not repay, and no row had any.

        So a small model pays one call in a step, and not some for each row.
        """
        if self._rates:
            return True
        found = self._num_rows_to_try.get(num_rows)
        if found is None:  # at most as many as a step has rows
            costs = self._costs(num_rows, self._max_num_drafts)
            found = not costs or AcceptanceRate(self._prior).best_length(costs) > 0
            self._num_rows_to_try[num_rows] = found
        return found

    def limit(self, request_id: str, limit: int, num_rows: int, num_step_tokens: int) -> int:
        """At most `limit` drafts for a row of a step that has so many rows and tokens already."""
        limit = min(limit, self._max_num_step_tokens - num_step_tokens)
        if limit < 1:
            return 0
        rate = self._rates.get(request_id)
        if rate is None:
            rate = self._rates[request_id] = AcceptanceRate(self._prior)
        if costs := self._costs(num_rows, limit):
            length = rate.best_length(costs)
        else:
            added = num_rows * self._token_cost + self._draft_cost
            least_chance = added / (1.0 + self._token_cost * num_step_tokens)
            length = rate.max_length(least_chance, limit)
        if not length:
            rate.note_step_without()
        return length

    def repay(self, ids_and_numbers: Sequence[tuple[str, int]], num_rows: int) -> bool:
        """Whether the drafts of a step of so many rows are expected to repay what they cost all of its rows.

        Some rows may have none: `limit` cannot know it, since rows are asked one after another. `ids_and_numbers` has
        the others' requests and numbers of drafts. Where no costs were measured they do.
        """
        mean = -(-sum(number for _, number in ids_and_numbers) // num_rows)
        if not (costs := self._costs(num_rows, mean)):
            return True
        num_tokens = sum(self._rates[name].num_expected(number) - 1.0 for name, number in ids_and_numbers)
        return 1.0 + num_tokens / num_rows >= LEAST_GAIN * costs[mean]

    def _costs(self, num_rows: int, limit: int) -> Sequence[float]:
        if not self._variant:
            return ()
        key = num_rows, limit
        found = self._key_to_costs.get(key)
        if found is None:  # at most as many as a step with drafts has rows, times the most drafts of a row
            found = self._key_to_costs[key] = draft_costs(self._variant, num_rows, limit, self._step_bytes)
        return found

    def note_verified(self, request_id: str, num_drafts: int, num_right: int) -> None:
        """Counts the verified drafts of a row."""
        rate = self._rates.get(request_id)
        if rate is not None:
            rate.note_verified(num_drafts, num_right)

    def forget(self, request_id: str) -> None:
        """Drops what is known of a request that has ended or lost its row."""
        self._rates.pop(request_id, None)
