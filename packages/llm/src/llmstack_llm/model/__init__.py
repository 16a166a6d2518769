"""Facts about a model, read from its folder."""
