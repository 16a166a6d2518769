"""Values out of JSON, in which a reader looks for what it expects."""

from __future__ import annotations

from typing import Any

JSONValue = Any
"""What `json` decodes: what reads it checks it."""

JSONObject = dict[str, Any]
"""An object, as `json` decodes it."""
