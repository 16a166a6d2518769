"""Where the time of a request went, and what other settings would do.

Everything runs the real scheduler and the real cache, without a model. `llmstack --help` imports this package for the
commands in it, so it imports nothing.
"""
