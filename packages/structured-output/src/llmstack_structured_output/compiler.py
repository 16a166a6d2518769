"""Compiler of constraints to grammars, checked, bounded and cached."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from llmstack_structured_output import errors
from llmstack_structured_output.grammars import choice_grammar, context_free_grammar
from llmstack_structured_output.json_schemas import SchemaOptions, schema_grammar
from llmstack_structured_output.limits import GrammarLimits
from llmstack_structured_output.matcher import Matcher
from llmstack_structured_output.regexes import regex_grammar
from llmstack_structured_output.structural_tags import structural_tag_grammar
from llmstack_structured_output.vocabulary import Vocabulary, load_vocabulary
from llmstack_types import InvalidRequestError, StructuredOutputsParams
from llmstack_types.vocabulary import StructuredOutputKind, words_of

KINDS = words_of(StructuredOutputKind)
DEFAULT_CACHE_SIZE = 256
_SCHEMAS = ("json", "structural_tag")
_SCHEMA = ((str, Mapping), "an object or its text")
_TYPES: Mapping[str, tuple[Any, str]] = {
    "json": _SCHEMA,
    "structural_tag": _SCHEMA,
    "regex": (str, "a string"),
    "grammar": (str, "a string"),
    "whitespace_pattern": (str, "a string"),
    "choice": ((list, tuple), "an array of strings"),
    "json_object": (bool, "a boolean"),
    "disable_any_whitespace": (bool, "a boolean"),
    "disable_additional_properties": (bool, "a boolean"),
}
# What the library says where a limit of ours ends its work.
_LIMIT_WORDS = ("fuel", "limit", "too complex", "too large", "too big", "too many", "exceed", "maximum")
_UNSATISFIABLE = "unsatisfiable"
# What it says in the words of its own code, and what that means.
_MEANINGS: Mapping[str, str] = {
    "NoExtensionBias": "no text satisfies it",
    "Enable 'coerce_one_of'": "the branches of a oneOf have to exclude each other",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint; immutable, and shared by the requests that have it.

    Attributes:
        kind: Which field of the parameters it came from.
    """

    kind: str
    _matcher: LLMatcher
    _eos_token_ids: frozenset[int]

    def new_matcher(self) -> Matcher:
        """A matcher at the beginning of a text; takes some ten microseconds."""
        return Matcher(self._matcher.deep_copy(), self._eos_token_ids)


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Safe to use from several threads; compiling releases the lock of Python.

    The vocabulary is read with the first constraint.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        limits: GrammarLimits | None = None,
        cache_size: int = DEFAULT_CACHE_SIZE,
    ) -> None:
        """`vocab_size` is the width of the logits. `cache_size`: Compiled grammars kept, those used last."""
        self.vocab_size = vocab_size
        self._load_vocabulary = functools.partial(load_vocabulary, tokenizer_folder, vocab_size, tuple(eos_token_ids))
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = limits or GrammarLimits()
        self._cache: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a constraint, from the cache where it was compiled before.

        Raises:
            InvalidRequestError: Names the field at fault, such as `structured_outputs.json`; the code is that of the
                error contract. Nothing is cached then.
        """
        params = normal_form(params)
        with self._lock:
            grammar = self._cache.get(params)
            if grammar is not None:
                self._cache.move_to_end(params)
                return grammar
        grammar = self._compile(params)
        with self._lock:
            self._cache[params] = grammar
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return grammar

    @property
    def num_cached(self) -> int:
        """Number of compiled grammars in the cache."""
        return len(self._cache)

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        kind = kind_of(params)
        param = f"structured_outputs.{kind}"
        vocabulary = self._living_vocabulary()
        text = _grammar_text(kind, param, params, self._limits, vocabulary)
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=_parser_limits(self._limits))
        error = matcher.get_error() or _first_steps_error(matcher)
        if error:
            raise _refusal(kind, param, error)
        return Grammar(kind, matcher, self._eos_token_ids)

    def _living_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary


def kind_of(params: StructuredOutputsParams) -> str:
    """The one field that is set.

    Raises:
        InvalidRequestError: None is, or several are.
    """
    found = [kind for kind in KINDS if (value := getattr(params, kind)) is not None and value is not False]
    if len(found) != 1:
        listed = ", ".join(KINDS)
        raise errors.invalid_constraint("structured_outputs", f"exactly one of {listed} must be set")
    return found[0]


def normal_form(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Equal constraints made equal and hashable: schemas as texts, choices as a tuple.

    Raises:
        InvalidRequestError: Not exactly one kind is set, or a field has the wrong type.
    """
    given: Any = params.json
    if isinstance(given, bool):  # these are schemas too
        params = replace(params, json=json.dumps(given))
    kind = kind_of(params)
    _check_types(params)
    value = getattr(params, kind)
    if kind in _SCHEMAS and not isinstance(value, str):
        text = _as_text(f"structured_outputs.{kind}", value)
        return replace(params, json=text) if kind == "json" else replace(params, structural_tag=text)
    return replace(params, choice=tuple(value)) if kind == "choice" else params


def check_sizes(params: StructuredOutputsParams, limits: GrammarLimits) -> None:
    """Refuses a constraint in normal form that is far over a limit, without reading it.

    Raises:
        InvalidRequestError: It has more characters than its limit has bytes, or too many strings.
    """
    kind = kind_of(params)
    param, value = f"structured_outputs.{kind}", getattr(params, kind)
    most = {
        "json": limits.max_schema_bytes, "structural_tag": limits.max_schema_bytes,
        "regex": limits.max_regex_bytes, "grammar": limits.max_grammar_bytes, "choice": limits.max_choice_bytes,
    }  # fmt: skip
    if kind == "json_object":
        return
    num_chars = sum(map(len, value)) if kind == "choice" else len(value)
    refuse = errors.schema_too_complex if kind in _SCHEMAS else errors.grammar_too_complex
    if kind == "choice" and len(value) > limits.max_choices:
        raise refuse(param, f"it has more than {limits.max_choices} strings")
    if num_chars > most[kind]:
        raise refuse(param, f"it has more than {most[kind]} bytes")


def _check_types(params: StructuredOutputsParams) -> None:
    for name, (types, expected) in _TYPES.items():
        value = getattr(params, name)
        if value is not None and not isinstance(value, types):
            raise errors.invalid_constraint(f"structured_outputs.{name}", f"expected {expected}")
        if isinstance(value, str):
            _check_text(f"structured_outputs.{name}", value)
    if params.choice is not None:
        _check_choices(params.choice)


def _check_choices(choices: Sequence[Any]) -> None:
    param = "structured_outputs.choice"
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise errors.invalid_constraint(param, "expected an array of strings that are not empty")
    for choice in choices:
        _check_text(param, choice)


def _check_text(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise errors.invalid_constraint(param, "the text holds half a surrogate pair") from None


def _as_text(param: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.invalid_json_schema(param, "it cannot be written as JSON") from error


def _grammar_text(
    kind: str, param: str, params: StructuredOutputsParams, limits: GrammarLimits, vocabulary: Vocabulary
) -> str:
    value, options = getattr(params, kind), SchemaOptions.of(params)
    match kind:
        case "regex":
            return regex_grammar(param, value, limits)
        case "choice":
            return choice_grammar(param, value, limits)
        case "grammar":
            return context_free_grammar(param, value, limits, vocabulary.special_tokens, vocabulary.tokenizer)
        case "structural_tag":
            lark = structural_tag_grammar(param, value, vocabulary.pieces, limits, options)
            return LLMatcher.grammar_from_lark(lark)
        case _:
            schema = {"type": "object"} if kind == "json_object" else value
            return schema_grammar(param, schema, limits, options)


def _first_steps_error(matcher: LLMatcher) -> str:
    """The error if the first mask, a token of it or the next mask takes too much work; else empty."""
    mask = matcher.compute_bitmask()
    first = next((index for index, byte in enumerate(mask) if byte), None)
    if first is None or matcher.is_error():
        return str(matcher.get_error())
    trial = matcher.deep_copy()
    trial.consume_token(8 * first + (mask[first] & -mask[first]).bit_length() - 1)
    if not trial.is_error():
        trial.compute_bitmask()
    return str(trial.get_error())


def _parser_limits(limits: GrammarLimits) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=limits.lexer_fuel,
        step_lexer_fuel=limits.step_fuel,
        step_max_items=limits.max_step_items,
        max_items_in_row=limits.max_row_items,
        max_lexer_states=limits.max_lexer_states,
        max_grammar_size=limits.max_grammar_size,
        verbose_errors=False,
    )


def _refusal(kind: str, param: str, message: str) -> InvalidRequestError:
    meanings = (meaning for words, meaning in _MEANINGS.items() if words in message)
    reason = next(meanings, errors.one_line(message))
    is_schema = kind in ("json", "json_object", "structural_tag")
    said = "".join(message.lower().replace('"', "'").split("'")[::2])  # without the names that it quotes
    if _UNSATISFIABLE not in said and any(word in said for word in _LIMIT_WORDS):
        return errors.schema_too_complex(param, reason) if is_schema else errors.grammar_too_complex(param, reason)
    if is_schema:
        return errors.invalid_json_schema(param, reason)
    return errors.invalid_regex(param, reason) if kind == "regex" else errors.invalid_grammar(param, reason)
