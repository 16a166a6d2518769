"""The one error of this package."""

from __future__ import annotations


class ModelFilesError(Exception):
    """A model cannot be found, or one of its files is missing, damaged or not allowed; the text is one line for a user."""
