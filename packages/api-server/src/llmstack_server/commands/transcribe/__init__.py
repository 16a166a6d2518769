"""The subcommand `llmstack transcribe`."""
