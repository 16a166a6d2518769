"""`llmstack collect-env`: what a report of a fault should say about the machine and what is installed on it."""
