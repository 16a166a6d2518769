"""Draft tokens that are made by a model."""
