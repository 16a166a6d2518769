"""Traits of a chat template: whether it reads content as parts or as one string."""

from __future__ import annotations

from typing import NamedTuple

import jinja2
from jinja2 import nodes

_SHAPE_TESTS = ("string", "iterable", "sequence", "mapping")


class ContentFormat(NamedTuple):
    """The form in which a template gets the content of a message.

    Attributes:
        keeps_parts: A list of parts stays one; otherwise their texts are joined.
        wraps_texts: A string becomes a list of one part.
    """

    keeps_parts: bool = False
    wraps_texts: bool = False


def content_format(environment: jinja2.Environment, source: str | None, setting: str = "auto") -> ContentFormat:
    """The format that `setting` names: `string`, `openai`, or `auto`, which asks the template."""
    if setting == "openai":
        return ContentFormat(keeps_parts=True, wraps_texts=True)
    if setting == "string" or source is None:
        return ContentFormat()
    template = environment.parse(source)
    loops_over_parts = any(_is_content(_looped_over(loop)) for loop in template.find_all(nodes.For))
    asks_for_shape = any(test.name in _SHAPE_TESTS for test in template.find_all(nodes.Test))
    return ContentFormat(keeps_parts=loops_over_parts, wraps_texts=loops_over_parts and not asks_for_shape)


def _looped_over(loop: nodes.For) -> nodes.Node:
    node: nodes.Node = loop.iter
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.EnvironmentAttribute):
        node = node.args[0]  # what our environment puts around every loop
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"
