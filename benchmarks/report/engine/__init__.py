"""Blocks that measure the model runner and the engine core over it."""
