"""The subcommands of `llmstack` that come with the engine core; light, since `llmstack --help` imports them."""
