"""Constraints on output at the door: whether they have a form, and whether they compile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack_llm import request_errors
from llmstack_types import InvalidRequestError, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from llmstack_structured_output import ConstraintChecker, GrammarCompiler

BACKENDS = ("auto", "guidance", "llguidance")


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """vLLM's options of structured output.

    Attributes:
        backend: All names mean llguidance, which vLLM calls `guidance`.
        disable_fallback: Either value holds: there is no other backend to fall back to.
        disable_any_whitespace: JSON comes without blanks, whatever the request says.
    """

    backend: str = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False


def read_structured_outputs_config(value: Mapping[str, Any] | str | None) -> StructuredOutputsConfig:
    """The configuration as a mapping or as JSON; None is the default.

    Raises:
        ValueError: It is none; one sentence.
    """
    try:
        named = json.loads(value) if isinstance(value, str) else value or {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs_config: it is no JSON: {error}") from error
    if not isinstance(named, Mapping):
        raise ValueError("structured_outputs_config: expected an object")
    known = {field.name: type(field.default) for field in dataclasses.fields(StructuredOutputsConfig)}
    for name, entry in named.items():
        if name not in known:
            raise ValueError(f"structured_outputs_config: {str(name)[:64]!r} is not available")
        if type(entry) is not known[name]:
            raise ValueError(f"structured_outputs_config: {name} must be of type {known[name].__name__}")
    config = StructuredOutputsConfig(**named)
    if config.backend not in BACKENDS:
        listed = ", ".join(BACKENDS)
        raise ValueError(f"structured_outputs_config: backend {config.backend[:64]!r} is not available, only {listed}")
    return config


def admit_constraint(params: SamplingParams, name: Callable[[str], str]) -> StructuredOutputsParams | None:
    """The constraint in its normal form; nothing is compiled yet.

    Raises:
        InvalidRequestError: It has no form, or cannot be combined with another field.
    """
    constraint = params.structured_outputs
    if constraint is None:
        return None
    if not isinstance(constraint, StructuredOutputsParams):
        raise request_errors.invalid_type(name("structured_outputs"), "an object", constraint)
    if params.allowed_token_ids is not None:
        reason = f"it cannot be combined with '{name('structured_outputs')}'"
        raise request_errors.invalid_value(name("allowed_token_ids"), reason)
    from llmstack_structured_output import normal_form

    try:
        return normal_form(constraint)
    except InvalidRequestError as error:
        raise _renamed(error, name) from error


class ConstraintAdmission:
    """Compiles constraints before a request is accepted; loads nothing before the first one."""

    def __init__(
        self, tokenizer_path: Path | None, eos_token_ids: Sequence[int], config: StructuredOutputsConfig
    ) -> None:
        """`tokenizer_path` is the tokenizer's folder; None where there is none."""
        self._tokenizer_path = tokenizer_path
        self._eos_token_ids = tuple(eos_token_ids)
        self._config = config
        self._compiler: GrammarCompiler | None = None
        self._checker: ConstraintChecker | None = None

    def check(self, params: SamplingParams, vocab_size: int, name: Callable[[str], str]) -> SamplingParams:
        """The parameters as the engine core gets them; compiles in this thread.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        if params.structured_outputs is None:
            return params
        constraint = self._with_defaults(params.structured_outputs)
        if self._compiler is None:
            from llmstack_structured_output import GrammarCompiler

            self._compiler = GrammarCompiler(self._tokenizer(name), vocab_size, self._eos_token_ids)
        try:
            self._compiler.compile(constraint)
        except InvalidRequestError as error:
            raise _renamed(error, name) from error
        return dataclasses.replace(params, structured_outputs=constraint)

    async def check_async(self, params: SamplingParams, vocab_size: int, name: Callable[[str], str]) -> SamplingParams:
        """`check`, in a process of its own and within a time.

        Raises:
            InvalidRequestError: Names the field at fault.
            ServerOverloadedError: Too many are waiting.
        """
        if params.structured_outputs is None:
            return params
        constraint = self._with_defaults(params.structured_outputs)
        if self._checker is None:
            from llmstack_structured_output import ConstraintChecker

            self._checker = ConstraintChecker(self._tokenizer(name), vocab_size, self._eos_token_ids)
        try:
            await self._checker.check(constraint)
        except InvalidRequestError as error:
            raise _renamed(error, name) from error
        return dataclasses.replace(params, structured_outputs=constraint)

    async def shutdown(self) -> None:
        """Ends the process. Idempotent."""
        if self._checker is not None:
            await self._checker.shutdown()

    def _with_defaults(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        if not self._config.disable_any_whitespace or constraint.disable_any_whitespace:
            return constraint
        return dataclasses.replace(constraint, disable_any_whitespace=True)

    def _tokenizer(self, name: Callable[[str], str]) -> Path:
        if self._tokenizer_path is None:
            raise request_errors.unsupported_value(name("structured_outputs"), "structured outputs need a tokenizer")
        return self._tokenizer_path


def _renamed(error: InvalidRequestError, name: Callable[[str], str]) -> InvalidRequestError:
    """The error with the field as the user knows it."""
    if error.param is None or name(error.param) == error.param:
        return error
    message = error.message.replace(f"'{error.param}'", f"'{name(error.param)}'")
    return InvalidRequestError(message, param=name(error.param), code=error.code)
