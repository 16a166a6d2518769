"""Explanations of the time of requests, and simulations of other settings.

Everything runs the real scheduler and the real cache, without a model. `llmstack --help` imports this package for the
commands in it, so it imports nothing.
"""
