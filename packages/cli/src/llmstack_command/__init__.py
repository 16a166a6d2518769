"""The `llmstack` command: finds subcommands by entry point and runs them."""
