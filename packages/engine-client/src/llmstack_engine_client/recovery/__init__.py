"""What goes on after an engine core has crashed: its requests, in the next one."""
