"""The constraint backend, constructed for the first constrained request."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

from llmstack_engine_core.protocols import ConstraintBackend
from llmstack_types import InvalidRequestError


class LazyBackend:
    """Makes a backend with the first call; a start without constrained requests pays nothing."""

    def __init__(self, name: str, tokenizer_path: str | None, vocab_size: int) -> None:
        """`name`: `module:Class`, called with the tokenizer's folder and the width of the logits."""
        self._name = name
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._backend: ConstraintBackend | None = None

    def __call__(self) -> ConstraintBackend:
        """The backend, the same with each call.

        Raises:
            InvalidRequestError: There is no tokenizer, or the backend is not installed.
        """
        with self._lock:
            if self._backend is None:
                self._backend = self._make()
            return self._backend

    def _make(self) -> ConstraintBackend:
        if self._tokenizer_path is None:
            raise _not_available("they need the model's tokenizer, and this engine has none")
        make: Callable[[str, int], ConstraintBackend] = _find(self._name)
        return make(self._tokenizer_path, self._vocab_size)


def _find(name: str) -> Callable[[str, int], ConstraintBackend]:
    module_name, _, class_name = name.partition(":")
    try:
        found: Callable[[str, int], ConstraintBackend] = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _not_available(f"{name[:64]} is not installed") from error
    return found


def _not_available(reason: str) -> InvalidRequestError:
    message = f"Structured outputs are not available: {reason}."
    return InvalidRequestError(message, param="structured_outputs", code="unsupported_value")
