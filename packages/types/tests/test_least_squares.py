"""Fits whose weights are known."""

import random

from llmstack_types.least_squares import RunningFit, fit_non_negative


def observe(fit, weights, rng, num_rows=40):
    for _ in range(num_rows):
        columns = [1.0, rng.uniform(0, 9), rng.uniform(0, 9)]
        value = sum(weight * column for weight, column in zip(weights, columns, strict=True))
        fit.observe([column / value for column in columns])


def test_weights_are_found_and_the_last_ones_count():
    fit, rng = RunningFit(3, kept=0.5), random.Random(1)
    observe(fit, (2.0, 1.0, 3.0), rng)
    assert [round(weight, 6) for weight in fit_non_negative(fit.gram, fit.sums)] == [2.0, 1.0, 3.0]
    observe(fit, (1.0, 4.0, 0.0), rng)
    assert [round(weight, 6) for weight in fit_non_negative(fit.gram, fit.sums)] == [1.0, 4.0, 0.0]
    assert fit.num_measured == 80


def test_no_weight_is_below_0():
    fit, rng = RunningFit(3, kept=1.0), random.Random(2)
    observe(fit, (5.0, 1.0, -0.3), rng)
    assert min(fit_non_negative(fit.gram, fit.sums)) >= 0.0


def test_without_measurements_every_weight_is_0():
    assert fit_non_negative([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]) == [0.0, 0.0]
