"""Facts about the machine and its software for bug reports."""
