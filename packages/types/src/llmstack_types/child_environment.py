"""Environment of child processes that need no secrets of their parent."""

from __future__ import annotations

from collections.abc import Mapping

SECRET_SUFFIXES = ("_API_KEY", "_API_KEYS")
SECRET_VARIABLES = frozenset({
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN",
    "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
})  # fmt: skip


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without API keys and tokens, also those of other programs."""
    return {name: value for name, value in environment.items() if not is_secret(name)}


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    upper = name.upper()
    return upper.endswith(SECRET_SUFFIXES) or upper in SECRET_VARIABLES
