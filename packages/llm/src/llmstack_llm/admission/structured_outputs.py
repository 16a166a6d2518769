"""Admission of constraints on the output: their form, and whether they compile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack_llm import request_errors
from llmstack_types import InvalidRequestError, StructuredOutputsParams
from llmstack_types.lifecycle import ClosingParts

if TYPE_CHECKING:
    from llmstack_structured_output import ConstraintChecker, GrammarCompiler

BACKENDS = ("auto", "guidance", "llguidance")
OTHER_BACKENDS = ("xgrammar", "outlines", "lm-format-enforcer")
"""Libraries that vLLM may use instead. They compile the same constraints, so their names are accepted."""

_BACKEND_DETAILS = {"no-fallback": "disable_fallback", "disable-any-whitespace": "disable_any_whitespace"}


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """vLLM's options of structured output.

    Attributes:
        backend: All names mean llguidance, which vLLM calls `guidance`. Options of older versions may follow a colon,
            such as `xgrammar:no-fallback`.
        disable_fallback: Either value holds: there is no other backend to fall back to.
        disable_any_whitespace: JSON comes without blanks, whatever the request says.
        disable_additional_properties: Objects that declare `properties` and say nothing of others have no others, where
            the request says nothing else. vLLM's default is false.
    """

    backend: str = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True


def read_structured_outputs_config(value: Mapping[str, object] | str | None) -> StructuredOutputsConfig:
    """The configuration as a mapping or as JSON; None is the default.

    Raises:
        ValueError: It is none; one sentence.
    """
    try:
        named = json.loads(value) if isinstance(value, str) else value or {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    if not isinstance(named, Mapping):
        raise ValueError("it is not a JSON object")
    known = {field.name: type(field.default) for field in dataclasses.fields(StructuredOutputsConfig)}
    for name, entry in named.items():
        if name == "reasoning_parser":
            raise ValueError("'reasoning_parser' is an option of its own")
        if name not in known:
            raise ValueError(f"{str(name)[:64]!r} is not available")
        if type(entry) is not known[name]:
            raise ValueError(f"{name} must be of type {known[name].__name__}")
    config = StructuredOutputsConfig(**named)
    backend, _, details = config.backend.partition(":")
    if backend not in (*BACKENDS, *OTHER_BACKENDS):
        listed = ", ".join((*BACKENDS, *OTHER_BACKENDS))
        raise ValueError(f"backend {config.backend[:64]!r} is not available, only {listed}")
    given: dict[str, Any] = {"backend": backend}
    for detail in filter(None, details.split(",")):
        if detail not in _BACKEND_DETAILS:
            raise ValueError(f"backend {config.backend[:64]!r}: {detail[:64]!r} is not available")
        given[_BACKEND_DETAILS[detail]] = True
    return dataclasses.replace(config, **given)


def normal_constraint(
    constraint: object, values: Mapping[str, object], names: Mapping[str, str]
) -> StructuredOutputsParams:
    """The constraint in its normal form; compiles nothing.

    `values`: The request's other sampling fields.
    `names`: The request's names of fields where they differ.

    Raises:
        InvalidRequestError: It is malformed, or excludes another field.
    """
    name = names.get("structured_outputs", "structured_outputs")
    if not isinstance(constraint, StructuredOutputsParams):
        expected = "StructuredOutputsParams" if isinstance(constraint, Mapping) else "an object"
        raise request_errors.invalid_type(name, expected, constraint)
    if values.get("allowed_token_ids") is not None:
        field = names.get("allowed_token_ids", "allowed_token_ids")
        raise request_errors.invalid_value(field, f"it cannot be combined with '{name}'")
    from llmstack_structured_output import normal_form

    try:
        return normal_form(constraint)
    except InvalidRequestError as error:
        raise _renamed(error, names) from error


class ConstraintAdmission(ClosingParts):
    """Compiles constraints before a request is accepted; loads nothing before the first one."""

    def __init__(
        self, tokenizer_path: Path | None, eos_token_ids: Sequence[int], config: StructuredOutputsConfig
    ) -> None:
        """`tokenizer_path` is the tokenizer's folder; None where there is none."""
        super().__init__()
        self._tokenizer_path = tokenizer_path
        self._eos_token_ids = tuple(eos_token_ids)
        self._config = config
        self._compiler: GrammarCompiler | None = None
        self._checker: ConstraintChecker | None = None

    def check(
        self, constraint: StructuredOutputsParams, vocab_size: int, names: Mapping[str, str]
    ) -> StructuredOutputsParams:
        """The constraint for the engine core; compiles it in this thread.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        constraint = self._with_defaults(constraint)
        if self._compiler is None:
            from llmstack_structured_output import GrammarCompiler

            self._compiler = GrammarCompiler(self._tokenizer(names), vocab_size, self._eos_token_ids)
        try:
            self._compiler.compile(constraint)
        except InvalidRequestError as error:
            raise _renamed(error, names) from error
        return constraint

    async def check_async(
        self, constraint: StructuredOutputsParams, vocab_size: int, names: Mapping[str, str], tenant: str = ""
    ) -> StructuredOutputsParams:
        """The constraint for the engine core; compiles it in a separate process within a time limit.

        `tenant`: An opaque id of the API key.

        Raises:
            InvalidRequestError: Names the field at fault.
            TenantLimitError: The tenant's constraints have used up their processor time.
            ServerOverloadedError: Too many are waiting.
        """
        constraint = self._with_defaults(constraint)
        if self._checker is None:
            from llmstack_structured_output import ConstraintChecker

            self._checker = ConstraintChecker(self._tokenizer(names), vocab_size, self._eos_token_ids)
            self.closing.append(self._checker)
        try:
            await self._checker.check(constraint, tenant)
        except InvalidRequestError as error:
            raise _renamed(error, names) from error
        return constraint

    def _with_defaults(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        config = self._config
        defaults: dict[str, Any] = {}
        if config.disable_any_whitespace and not constraint.disable_any_whitespace:
            defaults["disable_any_whitespace"] = True
        if not config.disable_additional_properties and constraint.disable_additional_properties is None:
            defaults["disable_additional_properties"] = False
        return dataclasses.replace(constraint, **defaults) if defaults else constraint

    def _tokenizer(self, names: Mapping[str, str]) -> Path:
        if self._tokenizer_path is None:
            name = names.get("structured_outputs", "structured_outputs")
            raise request_errors.unsupported_value(name, "structured outputs need a tokenizer")
        return self._tokenizer_path


def _renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error under the request's own name of the field."""
    if error.param is None or error.param not in names:
        return error
    name = names[error.param]
    message = error.message.replace(f"'{error.param}'", f"'{name}'")
    return InvalidRequestError(message, param=name, code=error.code)
