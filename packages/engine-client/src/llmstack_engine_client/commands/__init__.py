"""The subcommand `llmstack cluster-key`.

`llmstack --help` imports it, so it imports little.
"""
