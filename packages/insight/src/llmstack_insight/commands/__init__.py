"""Subcommands of `llmstack` that the engine core provides.

`llmstack --help` imports them, so they import little.
"""
