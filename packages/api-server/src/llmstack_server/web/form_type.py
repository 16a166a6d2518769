"""The media type of forms, apart from their parser, which few servers need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MEDIA_TYPE: Final = "multipart/form-data"


def is_form(headers: Mapping[str, str]) -> bool:
    """Whether a body is declared to be a form."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE
