"""Structural tags, as Lark grammars: free text with schemas between tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmstack_structured_output import errors
from llmstack_structured_output.grammars import check_choices
from llmstack_structured_output.json_schemas import SchemaOptions, prepared_schema, read_json
from llmstack_structured_output.lark import quote, regex
from llmstack_structured_output.limits import GrammarLimits
from llmstack_structured_output.regexes import check_regex, with_ascii_classes, without_anchors

SpellLiteral = Callable[[str], Sequence[str | int]]
"""A text as strings and ids of special tokens."""

_ANY_TEXT = r"/(.|\n)*/"
_MAX_TAGS = 256


def structural_tag_grammar(
    param: str,
    tag: str | Mapping[str, Any],
    spell: SpellLiteral,
    limits: GrammarLimits,
    options: SchemaOptions,
) -> str:
    """A Lark grammar for either form: `{"structures": [...], "triggers": [...]}` or `{"format": {...}}`.

    `options`: Those of all its schemas.

    Raises:
        InvalidRequestError: It has neither form, or is over a limit.
    """
    value = read_json(param, tag, limits)
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        raise errors.invalid_json_schema(param, "expected an object of type 'structural_tag'")
    top = value.get("format") if "format" in value else _format_of_structures(param, value)
    writer = _LarkWriter(param, spell, limits, options)
    return writer.grammar(top)


def _format_of_structures(param: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The older form in terms of the newer one."""
    structures = value.get("structures")
    if not isinstance(structures, list) or not all(isinstance(entry, dict) for entry in structures):
        raise errors.invalid_json_schema(param, "expected 'format', or 'structures' with 'triggers'")
    tags = [
        {
            "begin": entry.get("begin"),
            "content": {"type": "json_schema", "json_schema": entry.get("schema", {})},
            "end": entry.get("end"),
        }
        for entry in structures
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _LarkWriter:
    """Writes one rule per format; `expression`s are what the rules refer to each other by."""

    def __init__(self, param: str, spell: SpellLiteral, limits: GrammarLimits, options: SchemaOptions) -> None:
        self._param = param
        self._spell = spell
        self._limits = limits
        self._options = options
        self._rules: list[str] = []

    def grammar(self, top: Any) -> str:
        start = self._format(top, is_last=True)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _format(self, value: Any, *, is_last: bool) -> str:
        """`is_last`: Nothing follows it, so that free text may run to the end."""
        kind = value.get("type") if isinstance(value, dict) else None
        match kind:
            case "const_string" | "choice":
                return self._literal(self._text(value, "value")) if kind == "const_string" else self._choice(value)
            case "json_schema":
                return self._schema(value.get("json_schema"))
            case "regex":
                return self._regex(self._text(value, "pattern"))
            case "any_text":
                return self._free_text(is_last)
            case "sequence":
                elements = self._list(value, "elements")
                last = len(elements) - 1
                parts = [self._format(part, is_last=is_last and at == last) for at, part in enumerate(elements)]
                return " ".join(parts)
            case "or":
                parts = [self._format(element, is_last=is_last) for element in self._list(value, "elements")]
                return f"({' | '.join(parts)})"
            case "tag":
                return self._tag(value)
            case "triggered_tags":
                return self._triggered_tags(value, is_last)
            case "tags_with_separator":
                return self._tags_with_separator(value)
            case _:
                raise self._refusal(f"a format of type {str(kind)[:32]!r} is not supported")

    def _free_text(self, is_last: bool) -> str:
        if not is_last:
            raise self._refusal("'any_text' must come last, or be the content of a tag with an end")
        return _ANY_TEXT

    def _tag(self, tag: Any, begin: str | None = None) -> str:
        """`begin` is the rest of the opening tag; None for all of it."""
        if not isinstance(tag, dict):
            raise self._refusal("a tag must be an object")
        head = self._literal(self._text(tag, "begin") if begin is None else begin)
        content, end = tag.get("content"), tag.get("end")
        if isinstance(end, list) and len(end) == 1:
            end = end[0]
        if not isinstance(end, str):
            raise self._refusal("the 'end' of a tag must be a string")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return f"{head} {self._text_until(end)}"
        return f"{head} {self._format(content, is_last=False)} {self._literal(end)}"

    def _text_until(self, end: str) -> str:
        """Free text up to the first `end`."""
        if not end:
            raise self._refusal("a tag of 'any_text' needs an end")
        first, *rest = self._spell(end)
        if isinstance(first, int):  # free text holds no special token, so it ends by itself
            return f"{_ANY_TEXT} {_join([first, *rest])}"
        return f"{self._rule(f'{_ANY_TEXT} {quote(first)}', lazy=True)} {_join(rest)}"

    def _triggered_tags(self, value: dict[str, Any], is_last: bool) -> str:
        """Free text; where a trigger comes, one of its tags follows."""
        if not is_last:
            raise self._refusal("'triggered_tags' must come last")
        triggers = [self._checked_text(trigger) for trigger in self._list(value, "triggers")]
        tags = self._list(value, "tags")
        groups: dict[str, list[str]] = {}
        for tag in tags:
            begin = self._text(tag, "begin") if isinstance(tag, dict) else ""
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise self._refusal("the 'begin' of each tag must start with one of the triggers")
            groups.setdefault(trigger, []).append(self._tag(tag, begin[len(trigger) :]))
        bodies = [f"{self._text_until(trigger)} ({' | '.join(group)})" for trigger, group in groups.items()]
        any_tag = f"({' | '.join(bodies)})"
        is_needed, is_single = value.get("at_least_one") is True, value.get("stop_after_first") is True
        if is_single:
            return any_tag if is_needed else f"({any_tag} | {_ANY_TEXT})"
        return f"{any_tag}{'+' if is_needed else '*'} {_ANY_TEXT}"

    def _tags_with_separator(self, value: dict[str, Any]) -> str:
        """Tags and nothing else, with a text between two of them."""
        separator = value.get("separator", "")
        if not isinstance(separator, str):
            raise self._refusal("'separator' must be a string")
        any_tag = self._rule(" | ".join(self._tag(tag) for tag in self._list(value, "tags")))
        more = "" if value.get("stop_after_first") is True else f" ({self._literal(separator)} {any_tag})*"
        tags = f"({any_tag}{more})"
        return tags if value.get("at_least_one") is True else f"{tags}?"

    def _schema(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise self._refusal("'json_schema' must be an object")
        value = prepared_schema(self._param, json.dumps(schema), self._limits, self._options)
        return self._rule(f"%json {json.dumps(value, ensure_ascii=False)}")

    def _regex(self, pattern: str) -> str:
        check_regex(self._param, pattern, self._limits)
        return self._rule(regex(with_ascii_classes(without_anchors(pattern))))

    def _choice(self, value: dict[str, Any]) -> str:
        """One of some strings, which hold no special token; a format of this server alone."""
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
            raise self._refusal("'choices' must be an array of strings")
        check_choices(self._param, choices, self._limits)
        return self._rule(" | ".join(map(quote, choices)))

    def _literal(self, text: str) -> str:
        return _join(self._spell(text))

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _list(self, value: Any, name: str) -> list[Any]:
        entries = value.get(name)
        if not isinstance(entries, list) or not 0 < len(entries) <= _MAX_TAGS:
            raise self._refusal(f"'{name}' must be an array of 1 to {_MAX_TAGS} entries")
        return entries

    def _text(self, value: dict[str, Any], name: str) -> str:
        text = value.get(name)
        if not isinstance(text, str):
            raise self._refusal(f"'{name}' must be a string")
        return text

    def _checked_text(self, text: Any) -> str:
        if not isinstance(text, str) or not text:
            raise self._refusal("a trigger must be a string that is not empty")
        return text

    def _refusal(self, reason: str) -> Exception:
        return errors.invalid_json_schema(self._param, reason)


def _join(pieces: Sequence[str | int]) -> str:
    """Pieces of a text in Lark's notation."""
    return " ".join(quote(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in pieces) or '""'
