"""System and developer messages, in the roles and places that a template shows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from llmstack_llm.chat.messages import normal_messages
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.chat.template_traits import ContentFormat
from llmstack_types import InvalidRequestError
from llmstack_types.json_values import JSONObject, JSONValue

JOINT = "\n\n"
ROLES = ("system", "developer")
_PROBES = ("first-instruction", "second-instruction", "third-instruction")


class InstructionPlaces:
    """Finds out once where a template shows instructions, and moves the others.

    Many templates know no `developer`. Many leave out a system message that is not the first, or refuse it.
    """

    def __init__(self, template: ChatTemplate, content_format: ContentFormat) -> None:
        self._template = template
        self._content_format = content_format
        self._knows_developer = template.source is None or "developer" in template.source

    def fit(self, messages: list[JSONObject]) -> list[JSONObject]:
        """Messages of which the template shows every instruction that it can show; the same list for most chats."""
        for index, message in enumerate(messages):
            role = message["role"]
            if role == "developer" or (index and role == "system"):
                return self._fitted(messages)
        return messages

    def _fitted(self, messages: list[dict[str, object]]) -> list[dict[str, object]]:
        if not self._knows_developer:
            messages = [{**entry, "role": "system"} if entry["role"] == "developer" else entry for entry in messages]
        hidden = [entry for entry in messages[1:] if entry["role"] in ROLES and entry["role"] not in self._later_roles]
        if not hidden:
            return messages
        others = [entry for entry in messages if not any(entry is moved for moved in hidden)]
        if others and others[0]["role"] in ROLES:
            return [_merged([others[0], *hidden]), *others[1:]]
        return [_merged(hidden), *others]

    @functools.cached_property
    def has_system_prompt(self) -> bool:
        """Whether the template shows a system message before the first question."""
        messages = [{"role": "system", "content": _PROBES[0]}, {"role": "user", "content": "a"}]
        try:
            return _PROBES[0] in self._template.render(normal_messages(messages, self._content_format))
        except InvalidRequestError:
            return False

    @functools.cached_property
    def _later_roles(self) -> frozenset[str]:
        """The roles of instructions that the template shows wherever they stand."""
        return frozenset(role for role in ROLES if self._template.source is None or self._shows(role))

    def _shows(self, role: str) -> bool:
        first, second, third = _PROBES
        texts = (("system", first), (role, second), ("user", "a"), ("assistant", "b"), (role, third), ("user", "c"))
        messages = [{"role": role, "content": text} for role, text in texts]
        try:
            shown = self._template.render(normal_messages(messages, self._content_format))
        except InvalidRequestError:
            return False
        return all(probe in shown for probe in _PROBES)


def _merged(messages: Sequence[Mapping[str, JSONValue]]) -> JSONObject:
    """One message in place of several, with the role of the first."""
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return {**messages[0], "content": JOINT.join(contents)}
    parts = [content if isinstance(content, list) else [{"type": "text", "text": content}] for content in contents]
    joint = [{"type": "text", "text": JOINT}]
    return {**messages[0], "content": [part for index, run in enumerate(parts) for part in (joint * (index > 0)) + run]}
