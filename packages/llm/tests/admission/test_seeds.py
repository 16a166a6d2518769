"""Seeds of requests without one are random, or repeatable in a task that asks for it."""

from __future__ import annotations

import contextvars

from llmstack_llm.admission.seeds import completion_seed, draw_seed, draw_seeds_from


def test_drawn_seeds_are_random_and_fit_into_63_bits() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**56


def test_a_task_that_asks_for_it_draws_the_seeds_of_its_completions() -> None:
    def drawn(seed: int) -> list[int]:
        draw_seeds_from(seed)
        return [draw_seed() for _ in range(4)]

    first, second, other = (contextvars.copy_context().run(drawn, seed) for seed in (7, 7, 8))
    assert first == second == [completion_seed(7, index) for index in range(4)]
    assert not set(first) & set(other)
