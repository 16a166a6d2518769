"""Media in prompts: parts of messages, places among tokens, processors."""
