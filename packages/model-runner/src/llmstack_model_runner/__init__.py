"""Model runner: executes scheduled steps of a language model on one device."""
