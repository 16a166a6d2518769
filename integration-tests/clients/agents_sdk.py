"""OpenAI's Agents SDK: an agent that has to call a tool, by chats and by responses. Arguments: URL, model."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
url, name = sys.argv[1:]
client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
looked: list[bool] = []


@function_tool
def look(deep: bool) -> str:
    """Looks around."""
    looked.append(deep)
    return "a wood"


async def main() -> dict[str, object]:
    said: dict[str, object] = {}
    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
        agent = Agent(
            "teller",
            model=model(name, client),
            tools=[look],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        looked.clear()
        whole = await Runner.run(agent, "Hello", max_turns=3)
        streamed = Runner.run_streamed(agent, "Hello", max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        said[model.__name__] = [len(looked), whole.final_output, streamed.final_output, len(kinds)]
    return said


print(json.dumps(asyncio.run(main())))
