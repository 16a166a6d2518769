"""Pydantic AI: an agent whose output is a tool call, a native schema or text, by chats and by responses.

Arguments: URL, model.
"""

import asyncio
import json
import sys

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
provider = OpenAIProvider(base_url=url, api_key="none")
settings = {"temperature": 0.0, "max_tokens": 200}


class Animal(BaseModel):
    """An animal of a story."""

    model_config = ConfigDict(extra="forbid")
    is_small: bool


async def main() -> dict[str, object]:
    said: dict[str, object] = {}
    for kind, model in (
        ("chat", OpenAIChatModel(name, provider=provider)),
        ("responses", OpenAIResponsesModel(name, provider=provider)),
    ):
        agent = Agent(model, model_settings={**settings, "max_tokens": 20})
        whole = await agent.run("Tell me about a fox.")
        async with agent.run_stream("Tell me about a fox.") as stream:
            streamed = await stream.get_output()
        said[f"{kind}: text"] = [whole.output, streamed, whole.usage.output_tokens]
        for output in (ToolOutput(Animal), NativeOutput(Animal)):
            typed = await Agent(model, output_type=output, model_settings=settings, retries=0).run(
                "Tell me about a fox."
            )
            said[f"{kind}: {type(output).__name__}"] = typed.output.is_small
    return said


print(json.dumps(asyncio.run(main())))
