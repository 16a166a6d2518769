"""The jinja2 environment of chat templates, with limits of time and memory.

A template is a program of the model's author. Each round of a loop, each call, filter and operator looks at the clock,
so a template that would go on for ever ends. What makes a text longer says first by how much (`template_sizes`).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from llmstack_llm.chat.template_sizes import check_call, check_filter, check_operator, check_text

MAX_RENDER_S = 5.0

_deadline_s: ContextVar[float] = ContextVar("_deadline_s")


class TemplateTimeoutError(Exception):
    """The rendering took too long."""


class TemplateRefusalError(Exception):
    """The template itself refuses the conversation: it has called `raise_exception` with this text."""


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates; `limited_time` says how long a rendering may take.

    Attributes:
        clock: Seconds that only grow.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        extensions = [_GenerationTag, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        self.clock = clock
        self.filters["tojson"] = _to_json
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def limited_time(self, max_s: float = MAX_RENDER_S) -> Iterator[None]:
        """Whatever is rendered in the block raises TemplateTimeoutError once the time is over."""
        token = _deadline_s.set(self.clock() + max_s)
        try:
            yield
        finally:
            _deadline_s.reset(token)

    def timed(self, iterable: Iterable[object]) -> Iterator[object]:
        """The same items, with a look at the clock before each."""
        for item in iterable:
            self._check_time()
            yield item

    def call(self, context: jinja2.runtime.Context, obj: object, /, *args: Any, **kwargs: object) -> object:
        """Every call of a template goes through here."""
        self._check_time()
        check_call(obj, args, kwargs)
        if isinstance(obj, jinja2.runtime.LoopContext) and args:  # the next level of a recursive loop
            args = (self.timed(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        """Operators whose operands say how large the result would be."""
        self._check_time()
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def joined(self, *values: object) -> object:
        """`a ~ b`, which jinja2 would join without asking for the sizes."""
        self._check_time()
        for value in values:
            check_text(value)
        texts = [*map(str, values)]
        check_operator("+", "".join(texts[:-1]), texts[-1])
        return "".join(texts)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that looks at the clock, and at the sizes that it is given."""

        @functools.wraps(function)  # with the mark of what jinja2 passes first
        def limited(*args: object, **kwargs: object) -> object:
            self._check_time()
            check_filter(name, args, kwargs)
            return function(*args, **kwargs)

        return limited

    def _check_time(self) -> None:
        if self.clock() > _deadline_s.get():
            raise TemplateTimeoutError

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        _Limits().visit(template)
        return template.set_environment(self)  # type: ignore[return-value]  # it returns what it was called on


class _Limits(jinja2.visitor.NodeTransformer):
    """Lets every loop go over `environment.timed(items)`, and `~` call `environment.joined`."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:
        self.generic_visit(node)
        joined = jinja2.nodes.EnvironmentAttribute("joined", lineno=node.lineno)
        return jinja2.nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self.generic_visit(node)
        timed = jinja2.nodes.EnvironmentAttribute("timed", lineno=node.lineno)
        node.iter = jinja2.nodes.Call(timed, [node.iter], [], None, None, lineno=node.lineno)
        return node


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The body as a block of its own, so that names set in it stay in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        return str(caller())


def _written(value: object) -> object:
    """A value that a template writes out."""
    if not isinstance(value, str):
        check_text(value)
    return value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own filter escapes HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
