"""Haystack: its generator for chats, whole, streamed and with a schema. Arguments: URL, model."""

import json
import sys

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

url, name = sys.argv[1:]
SCHEMA = {
    "type": "object",
    "properties": {"small": {"type": "boolean"}},
    "required": ["small"],
    "additionalProperties": False,
}
messages = [ChatMessage.from_user("Tell me about a fox.")]
pieces: list[str] = []


def generator(**more: object) -> OpenAIChatGenerator:
    settings = {"temperature": 0, "max_tokens": 12} | more.pop("settings", {})
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model=name,
        api_base_url=url,
        max_retries=0,
        generation_kwargs=settings,
        **more,
    )


whole = generator().run(messages)["replies"][0]
streamed = generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(messages)["replies"][0]
form = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}
made = generator(settings={"response_format": form, "max_tokens": 60}).run(messages)["replies"][0]
print(
    json.dumps(
        {
            "whole": whole.text,
            "usage": whole.meta["usage"]["completion_tokens"],
            "streamed": streamed.text,
            "pieces": "".join(pieces),
            "object": json.loads(made.text),
        }
    )
)
