"""Subcommands of `llmstack` about recorded and simulated steps.

`llmstack --help` imports them, so they import little.
"""
