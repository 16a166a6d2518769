"""Contents of a message in place of the texts of a score, in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.media.parts import MEDIA_TYPES, MediaPart, read_part
from llmstack_llm.media.served import KINDS


@dataclass(frozen=True, slots=True)
class ScoreContent:
    """The content in place of a text: texts and pictures, as in a message of the user.

    Attributes:
        parts: Checked, but for whether the model takes such pictures.
        given: As the request has them.
        param: Its name there.
    """

    parts: Sequence[Mapping[str, Any] | MediaPart]
    given: Sequence[Any] = field(repr=False)
    param: str

    @property
    def texts(self) -> list[str]:
        """Its texts, in order."""
        return [part["text"] for part in self.parts if isinstance(part, Mapping)]

    @property
    def text(self) -> str:
        """Its texts as one, a line each, for a model that reads pairs of texts.

        Raises:
            InvalidRequestError: There are pictures.
        """
        for part in self.parts:
            if isinstance(part, MediaPart):
                raise request_errors.unsupported_parameter(f"{part.param}.type", "this model reads pairs of texts")
        return "\n".join(self.texts)

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation of which a model makes its vector."""
        return [{"role": "user", "content": list(self.parts)}]


ScoreText = str | ScoreContent
"""One of what is compared."""


def read_score_text(value: object, param: str, expected: str = "a string") -> ScoreText:
    """A string, an object with a `text`, or one with a `content` of parts.

    Raises:
        InvalidRequestError: It is another value, or a part is malformed; `param` names it.
    """
    if not isinstance(value, Mapping):
        if not isinstance(value, str):
            raise request_errors.invalid_type(param, expected, value)
        return value
    text, content = value.get("text"), value.get("content")
    if content is None:
        if text is None:
            raise request_errors.missing_parameter(f"{param}.text")
        return read_score_text(text, param, expected)
    if text is not None:
        raise request_errors.invalid_value(f"{param}.text", "give either 'text' or 'content'")
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise request_errors.invalid_type(f"{param}.content", "a string or an array of content parts", content)
    if not content:
        raise request_errors.empty_array(f"{param}.content")
    parts = [_read(f"{param}.content[{index}]", part) for index, part in enumerate(content)]
    return ScoreContent(parts, content, param)


def _read(param: str, part: object) -> Mapping[str, object] | MediaPart:
    if not isinstance(part, Mapping):
        raise request_errors.invalid_type(param, "an object", part)
    if part.get("type") != "text" and (part.get("type") in MEDIA_TYPES or "type" not in part):
        return read_part(param, part, KINDS)
    text = part.get("text")
    if part.get("type") != "text":
        raise request_errors.invalid_value(f"{param}.type", "expected 'text', or a picture such as 'image_url'")
    if text is None:
        raise request_errors.missing_parameter(f"{param}.text")
    if not isinstance(text, str):
        raise request_errors.invalid_type(f"{param}.text", "a string", text)
    check_text(f"{param}.text", text)
    return {"type": "text", "text": text}
