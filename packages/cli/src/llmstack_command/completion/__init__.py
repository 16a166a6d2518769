"""`llmstack completion`: a script that lets a shell complete commands, flags and their values by itself."""
