"""Parsers of calls and reasoning from the response template of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Final, NamedTuple

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS, JsonCallParser
from llmstack_output_parsers.marked_json import MarkedJsonToolParser
from llmstack_output_parsers.parser import ToolParser, ToolSchemas
from llmstack_output_parsers.pythonic import Lfm2ToolParser
from llmstack_output_parsers.reader import Steps
from llmstack_output_parsers.reasoning import ThinkParser
from llmstack_output_parsers.registry import ReasoningParserFactory, ToolParserFactory
from llmstack_output_parsers.schema_values import Schemas, json_text
from llmstack_output_parsers.template_fields import PYTHON_CALLS, Field, ResponseTemplateError, read_fields
from llmstack_output_parsers.template_values import CONTENT_READERS, MAX_PATTERN_S, limited, transformed

MAX_OPENING_CHARS: Final = 512
"""Of a text that a pattern is to match, such as a tag with the name of a function."""
_NEVER: Final = "\x00"
"""A text that ends no call: where a field has no end, the end of the message is one."""
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_CALLS: Final = "tool_calls"
_CALL: Final = "function"


class TemplateParsers(NamedTuple):
    """The parsers of reasoning and of calls by a response template; None where it says nothing."""

    reasoning: ReasoningParserFactory | None
    tools: ToolParserFactory | None


def parsers_of_template(template: object) -> TemplateParsers:
    """Parsers for the `response_template` of a tokenizer's configuration.

    Raises:
        ResponseTemplateError: It is malformed, or has a form that these parsers do not read.
    """
    fields = read_fields(template)
    thinking = next((fields[name] for name in _REASONING if name in fields), None)
    calls = fields.get(_CALLS)
    reasoning = None if thinking is None else _reasoning(thinking, fields.get("content") or Field())
    return TemplateParsers(reasoning, None if calls is None else _tools(calls))


def is_same_form(found: ToolParserFactory, known: ToolParserFactory) -> bool:
    """Whether the parser of a template reads calls that a parser of ours reads, which passes arguments on earlier."""
    are_objects = [isinstance(one, type) and issubclass(one, JsonCallParser) for one in (found, known)]
    begin_alike = any(token in found.kept_tokens for token in known.kept_tokens)
    return begin_alike and are_objects[0] == are_objects[1]


def _reasoning(thinking: Field, content: Field) -> ReasoningParserFactory:
    answer_tokens = (*thinking.opens, *content.opens, *content.closes) if content.opens else thinking.opens
    if not thinking.opens or not thinking.closes or content.open_pattern:
        raise ResponseTemplateError("reasoning or the answer has no text on both sides")
    for texts in (answer_tokens, thinking.closes):
        _check_distinct(texts)
    own: dict[str, object] = {
        "__doc__": "Reasoning as the response template says.",
        "start": thinking.opens[0], "other_starts": thinking.opens[1:],
        "end": thinking.closes[0], "other_ends": thinking.closes[1:],
        "answer_tokens": answer_tokens, "kept_tokens": (*thinking.tokens, *content.tokens),
    }  # fmt: skip
    made: type[ThinkParser] = type("TemplateReasoningParser", (ThinkParser,), own)
    return made


def _check_distinct(texts: Sequence[str]) -> None:
    """Raises ResponseTemplateError for texts that the reader cannot tell apart while they arrive."""
    firsts = {text[0] for text in texts}
    if len(firsts) > 1 or any(one != other and one.startswith(other) for one in texts for other in texts):
        raise ResponseTemplateError(f"the texts {', '.join(texts)[:128]} begin differently, or one begins another")


def _tools(calls: Field) -> ToolParserFactory:
    if not calls.starts:
        raise ResponseTemplateError("calls have no text in front")
    _check_distinct(calls.starts)
    _check_distinct(calls.closes)
    keys = None if calls.open_pattern or calls.content_args else _keys(calls)
    own: dict[str, object] = {
        "__doc__": "Calls as the response template says.",
        "starts": calls.opens, "closings": calls.closes, "kept_tokens": calls.tokens,
    }  # fmt: skip
    if calls.content == PYTHON_CALLS:
        if keys != ("name", "arguments"):
            raise ResponseTemplateError("calls of Python are transformed in another form than calls have")
        listed: type[Lfm2ToolParser] = type("TemplatePythonToolParser", (Lfm2ToolParser,), own)
        return listed
    if calls.content != "json" or keys is None:
        return TemplateTools(calls, calls.tokens)
    own |= {"name_key": keys[0], "argument_keys": keys[1:]}
    if calls.closes and keys == ("name", "arguments"):
        own["strict_tags"] = (f"{calls.opens[0]}\n", f"\n{calls.closes[0]}")
    made: type[MarkedJsonToolParser] = type("TemplateJsonToolParser", (MarkedJsonToolParser,), own)
    return made


def _keys(calls: Field) -> tuple[str, ...] | None:
    """Keys of name and arguments where an object has both; None for other forms."""
    form = calls.transform.get(_CALL) if isinstance(calls.transform, Mapping) else None
    if form == "{content}":
        return ("name", "arguments")
    before = "" if calls.is_each else "content."
    texts = [form.get(key) for key in ("name", "arguments")] if isinstance(form, Mapping) else []
    keys = [text[1 + len(before) : -1] for text in texts if isinstance(text, str) and text.startswith(f"{{{before}")]
    return tuple(keys) if len(keys) == len(texts) == 2 and all(key.isidentifier() for key in keys) else None


@dataclass(frozen=True, slots=True)
class TemplateTools:
    """Makes a parser for each message."""

    calls: Field
    kept_tokens: Sequence[str]

    def __call__(self, tools: ToolSchemas) -> TemplateToolParser:
        """A parser for a message that may call `tools`."""
        return TemplateToolParser(self.calls, tools)


class TemplateToolParser(ToolParser):
    """Calls whose text is read when it is complete, in the form that a response template names."""

    def __init__(
        self, calls: Field, tools: ToolSchemas | None = None, *, call_ids: Callable[[], str] | None = None
    ) -> None:
        super().__init__(tools, call_ids=call_ids)
        self._field = calls

    @property
    def starts(self) -> Sequence[str]:
        """The texts that begin a call anywhere in a message."""
        return self._field.starts

    def has_call(self, text: str) -> bool:
        """Whether a message with this text has a call."""
        parser = TemplateToolParser(self._field, self.tools)
        return bool(parser.feed(text).tool_calls or parser.finish().tool_calls)

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until(self.starts)):
            self.reader.hold()
            values = yield from self._read_opening(before)
            body = None if values is None else (yield from self._read_body())
            calls = [] if values is None or body is None else self._calls_of(values, body)
            held = self.reader.release()
            if not calls:
                self.say_refused(before + held)
            for name, arguments in calls:
                self.begin_call(name)
                self.add_arguments(arguments)

    def _read_opening(self, text: str) -> Steps[dict[str, str] | None]:
        """The groups of the pattern, which `text` begins; None if what follows does not match it, or not in time."""
        if not self._field.open_pattern:
            return {}
        import regex  # late: few templates have patterns

        pattern, left_s = regex.compile(self._field.open_pattern, regex.DOTALL), MAX_PATTERN_S
        try:
            while len(text) < MAX_OPENING_CHARS and left_s > 0:  # all characters have the time of one text
                character = yield from self.reader.peek()
                begun_s = thread_time()
                found = limited(pattern.match, text + character, partial=bool(character), limit_s=left_s)
                left_s -= thread_time() - begun_s
                if found is None:
                    return None
                if not character or (not found.partial and found.end() <= len(text)):
                    return {name: value for name, value in found.groupdict().items() if value is not None}
                text += self.reader.take(1)
        except TimeoutError:
            pass
        return None

    def _read_body(self) -> Steps[str | None]:
        """The text of a call, whose end is taken; None if it is too long."""
        pieces: list[str] = []
        closes = self._field.closes or (_NEVER,)
        while self.reader.room > 0:
            text, found = self.reader.take_until(closes, self.reader.room)
            pieces.append(text)
            if found or self.reader.is_at_end:
                return "".join(pieces)
            if self.reader.room > 0:
                yield
        return None

    def _calls_of(self, values: dict[str, str], body: str) -> list[tuple[str, str]]:
        """Names and the JSON text of arguments; none where the text has another form."""
        field = self._field
        try:
            content = CONTENT_READERS[field.content](body, field.content_args)
            scopes = [{**values, **entry} for entry in content] if field.is_each else [{**values, "content": content}]
            return [self._call(transformed(field.transform, scope)[_CALL]) for scope in scopes]
        except (ValueError, TypeError, KeyError, RecursionError, TimeoutError):
            return []

    def _call(self, given: Mapping[str, object]) -> tuple[str, str]:
        name, arguments = given["name"], given.get("arguments")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise ValueError("a call has no name")
        if isinstance(arguments, Mapping):
            schemas = Schemas(self.tools.get(name))
            texts = (f"{json_text(key)}: {_value_text(schemas, key, value)}" for key, value in arguments.items())
            return name, f"{{{', '.join(texts)}}}"
        if arguments is None or isinstance(arguments, str):
            return name, arguments or "{}"
        raise ValueError("a call has no arguments")


def _value_text(schemas: Schemas, key: str, value: object) -> str:
    """JSON of a value; a string is what its schema says that it is."""
    return schemas.converted(value, schemas.of_property(key)) if isinstance(value, str) else json_text(value)
