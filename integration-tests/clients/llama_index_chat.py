"""LlamaIndex: OpenAILike for a completion, a chat, both streamed, and a tool call. Arguments: URL, model."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, name = sys.argv[1:]
place = {"model": name, "api_base": url, "api_key": "none", "temperature": 0, "max_retries": 0, "context_window": 512}
chat = OpenAILike(is_chat_model=True, max_tokens=12, **place)
caller = OpenAILike(is_chat_model=True, is_function_calling_model=True, max_tokens=100, **place)
text = OpenAILike(is_chat_model=False, max_tokens=12, **place)
messages = [ChatMessage(role="user", content="Tell me about a fox.")]


def look(deep: bool) -> bool:
    """Looks around."""
    return deep


tool = FunctionTool.from_defaults(look)
called = caller.chat_with_tools([tool], user_msg="Look.", tool_required=True)
said = {
    "chat": chat.chat(messages).message.content,
    "chat_streamed": "".join(part.delta or "" for part in chat.stream_chat(messages)),
    "text": text.complete("Once upon a time").text,
    "text_streamed": "".join(part.delta or "" for part in text.stream_complete("Once upon a time")),
    "calls": [[call.tool_name, call.tool_kwargs] for call in caller.get_tool_calls_from_response(called)],
}
print(json.dumps(said))
