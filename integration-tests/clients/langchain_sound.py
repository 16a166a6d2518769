"""LangChain's ChatOpenAI about a sound. Arguments: URL, model, the WAV file in base64, the question."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model, data, question = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=12, max_retries=0)
text = {"type": "text", "text": question}
parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, text]
# LangChain's own form of the same, which it turns into that of the API.
own = [{"type": "audio", "base64": data, "mime_type": "audio/wav"}, text]
answers = [chat.invoke([("user", content)]) for content in (parts, own)]
streamed = "".join(chunk.content for chunk in chat.stream([("user", parts)]))
print(json.dumps([*[answer.content for answer in answers], streamed]))
