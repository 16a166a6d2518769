"""Documents and search results in plain text, as the text that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_server.apis.anthropic.content import Block
from llmstack_server.chat.turns import PARTS_JOINT, required_text
from llmstack_server.web.errors import missing_parameter


def _document(param: str, block: Block) -> str:
    source = block.get("source")
    if source is None:
        raise missing_parameter(f"{param}.source")
    if not isinstance(source, dict):
        raise request_errors.invalid_type(f"{param}.source", "an object", source)
    kind = required_text(f"{param}.source", source, "type")
    if kind == "text":
        text = required_text(f"{param}.source", source, "data")
    elif kind == "content":
        text = _texts(f"{param}.source.content", source.get("content"))
    else:
        reason = "this model takes text only: the source of a document may be 'text' or 'content'"
        raise request_errors.unsupported_parameter(f"{param}.source.type", reason)
    return PARTS_JOINT.join([*_headings(param, block, "title", "context"), text])


def _search_result(param: str, block: Block) -> str:
    text = _texts(f"{param}.content", block.get("content"))
    return PARTS_JOINT.join([*_headings(param, block, "title", "source"), text])


def _headings(param: str, block: Block, *names: str) -> list[str]:
    return [text for name in names if block.get(name) is not None and (text := required_text(param, block, name))]


def texts_joint(param: str, content: object, read_block: Callable[[str, object], str]) -> str:
    """A string, or the texts of an array of blocks, which `read_block` reads by their place and themselves."""
    if isinstance(content, str):
        check_text(param, content)
        return content
    if not isinstance(content, list):
        raise request_errors.invalid_type(param, "a string or an array of text blocks", content)
    return PARTS_JOINT.join(read_block(f"{param}[{index}]", block) for index, block in enumerate(content))


def _texts(param: str, content: object) -> str:
    if content is None:
        raise missing_parameter(param)
    return texts_joint(param, content, _text)


def _text(param: str, part: object) -> str:
    if not isinstance(part, dict):
        raise request_errors.invalid_type(param, "an object", part)
    if part.get("type") != "text":
        raise request_errors.unsupported_parameter(f"{param}.type", "what is quoted is text only")
    return required_text(param, part, "text")


QUOTES: Mapping[str, Callable[[str, Block], str]] = {"document": _document, "search_result": _search_result}
"""The text of each type of block that quotes one; the name of the block, and the block, are the arguments."""
