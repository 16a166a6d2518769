"""Recovery after a crash of an engine core: its requests go on in the next one."""
