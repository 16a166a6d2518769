"""Shell completion of commands, flags and values."""
