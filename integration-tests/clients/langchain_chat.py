"""LangChain's ChatOpenAI: one answer, the same streamed, and two at once. Arguments: URL, model."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(
    base_url=url, api_key="none", model=model, temperature=0, max_tokens=12, max_retries=0, stream_usage=True
)
messages = [("system", "You tell stories."), ("user", "Tell me about a fox.")]
whole = chat.invoke(messages)
chunks = list(chat.stream(messages))
streamed = chunks[0]
for chunk in chunks[1:]:
    streamed += chunk
said = {
    "whole": whole.content,
    "whole_usage": whole.usage_metadata,
    "finish_reason": whole.response_metadata["finish_reason"],
    "streamed": streamed.content,
    "streamed_usage": streamed.usage_metadata,
    "num_chunks": len(chunks),
    "both": [answer.content for answer in chat.batch([messages, [("user", "Hello")]])],
}
print(json.dumps(said))
