"""The tokenizer of `LLM.get_tokenizer`, with methods known from transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmstack_llm.requests import RenderedPrompt
from llmstack_llm.text.tokenizer import Tokenizer

Render = Callable[..., list[RenderedPrompt]]
"""Makes prompts of one conversation, or of many; its options are those of `RenderOptions`."""


class OfflineTokenizer(Tokenizer):
    """A tokenizer that is callable and renders conversations; the parts of the one that it is made of are shared."""

    def __init__(self, tokenizer: Tokenizer, render: Render) -> None:
        self.__dict__.update(tokenizer.__dict__)
        self._render = render

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, object]:
        """`input_ids` and `attention_mask` of a text, or a list of each for several texts, without padding."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        several = [self(one, add_special_tokens=add_special_tokens) for one in text]
        return {name: [one[name] for one in several] for name in ("input_ids", "attention_mask")}

    def __len__(self) -> int:
        """The number of tokens."""
        return self.vocab_size

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token that the tokenizer's configuration names."""
        return self.named_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        """The begin-of-sequence token that the tokenizer's configuration names."""
        return self.named_tokens.get("bos_token")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]] | Sequence[Sequence[Mapping[str, object]]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: object,
    ) -> str | list[int] | list[str] | list[list[int]]:
        """The prompt of a conversation, as token ids or as text; a list of them for several conversations.

        `template_kwargs`: Further variables of the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: The template does not accept the messages, or the prompt is too long for the model.
        """
        prompts = self._render(
            conversation, tools=tools, chat_template=chat_template, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, chat_template_kwargs=template_kwargs,
        )  # fmt: skip
        is_one = not conversation or isinstance(conversation[0], Mapping)
        if tokenize:
            ids = [prompt.token_ids for prompt in prompts]
            return ids[0] if is_one else ids
        texts = [prompt.text for prompt in prompts]
        return texts[0] if is_one else texts
