"""Sound as encoders read it."""
