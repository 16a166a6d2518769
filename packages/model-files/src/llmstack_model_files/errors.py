"""The one error of this package."""

from __future__ import annotations


class ModelFilesError(Exception):
    """A model cannot be found, or a file of it is missing, damaged or not allowed; the text is one line for a user."""
