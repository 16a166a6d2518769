"""Preprocessing of each model family: placeholders by size, patches from pixels."""
