"""Names of the files of packed weights; torch is not needed to find them."""

from __future__ import annotations

import os
from pathlib import Path

from llmstack_model_files import weights_digest

SUFFIX = ".packed"
# The load itself needs memory; more in the page cache would be dropped before it is used.
SHARE_OF_MEMORY = 4
"""The part of the free memory, its inverse, that is filled with files before they are needed."""


def cache_folder() -> Path:
    """The folder of packed weights: `llmstack/packed` in `XDG_CACHE_HOME`, `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "llmstack" / "packed"


def files_digest(model_path: Path) -> str:
    """Digest of what tells a model's weight files apart, without reading them; empty where there are none.

    The name of a file of packed weights begins with it.
    """
    return weights_digest(model_path, of_place=True)


def packed_before(model_path: Path) -> list[Path]:
    """Files of packed weights of a model, for any options; those that were used last are first."""
    digest = files_digest(model_path)
    found = cache_folder().glob(f"{digest}-*{SUFFIX}") if digest and cache_folder().is_absolute() else ()
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)
