"""Which template renders a conversation: the model's, the one it keeps for tools, or the request's own."""

from __future__ import annotations

from llmstack_llm import request_errors
from llmstack_llm.chat import ChatRenderer
from llmstack_llm.chat_template import ChatTemplate, ChatTemplateError
from llmstack_llm.tokenizer import Tokenizer

MAX_KEPT_TEMPLATES = 8


class ChatRenderers:
    """The renderers of one model; a few of those that requests brought are kept compiled."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        content_format: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._content_format = content_format
        self._default = ChatRenderer(template, tokenizer, content_format=content_format)
        self._with_tools = self._default
        if template.tool_template is not None:
            self._with_tools = ChatRenderer(template.tool_template, tokenizer, content_format=content_format)
        self._source_to_renderer: dict[str, ChatRenderer] = {}

    def pick(self, *, has_tools: bool, chat_template: str | None = None) -> ChatRenderer:
        """The renderer for one conversation; `chat_template` is the request's own, as text.

        Raises:
            InvalidRequestError: It is no template.
        """
        if chat_template is not None:
            return self._of_request(chat_template)
        return self._with_tools if has_tools else self._default

    def _of_request(self, source: str) -> ChatRenderer:
        found = self._source_to_renderer.pop(source, None)
        if found is None:
            try:
                found = self._compile(source)
            except ChatTemplateError:
                raise request_errors.invalid_value("chat_template", "it is no valid Jinja template") from None
        self._source_to_renderer[source] = found  # the newest last
        if len(self._source_to_renderer) > MAX_KEPT_TEMPLATES:
            del self._source_to_renderer[next(iter(self._source_to_renderer))]
        return found

    def _compile(self, source: str) -> ChatRenderer:
        template = ChatTemplate(source, self._tokenizer.named_tokens)
        return ChatRenderer(template, self._tokenizer, content_format=self._content_format)
