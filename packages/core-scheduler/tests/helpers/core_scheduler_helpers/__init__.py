"""Helpers of the tests of the scheduler: the seeded simulation and the command that runs many seeds."""
