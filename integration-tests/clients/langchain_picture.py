"""LangChain's ChatOpenAI about a picture. Arguments: URL, model, the picture as a data URL, the question."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model, picture, question = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=12, max_retries=0)
parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
# LangChain's own form of the same, which it turns into that of the API.
media_type, data = picture.removeprefix("data:").split(";base64,")
own = [{"type": "image", "base64": data, "mime_type": media_type}, {"type": "text", "text": question}]
print(json.dumps([chat.invoke([("user", content)]).content for content in (parts, own)]))
