"""Ollama's client: chat, prompt, stream, format, vectors, models and a mistake. Arguments: URL, model."""

import json
import sys

import ollama

url, model = sys.argv[1:]
client = ollama.Client(host=url.removesuffix("/v1"))
messages = [{"role": "user", "content": "Tell me about a fox."}]
options = {"temperature": 0, "num_predict": 10}
whole = client.chat(model=model, messages=messages, options=options)
parts = list(client.chat(model=model, messages=messages, options=options, stream=True))
prompt = client.generate(model=model, prompt="Tell me about a fox.", options=options)
raw = list(client.generate(model=model, prompt="Once upon a time", raw=True, options=options, stream=True))
schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
formatted = client.chat(model=model, messages=messages, format=schema, options={"num_predict": 400, "seed": 1})
try:
    client.chat(model="nobody", messages=messages)
    mistake = ""
except ollama.ResponseError as error:
    mistake = f"{error.status_code} {error.error}"
said = {
    "models": [one.model for one in client.list().models],
    "running": [one.model for one in client.ps().models],
    "capabilities": client.show(model).capabilities,
    "whole": whole.message.content,
    "whole_count": whole.eval_count,
    "streamed": "".join(part.message.content for part in parts),
    "num_parts": len(parts),
    "streamed_count": parts[-1].eval_count,
    "prompt": prompt.response,
    "raw": "".join(part.response for part in raw),
    "formatted": json.loads(formatted.message.content),
    "num_vectors": len(client.embed(model=model, input=["a fox", "a crow"]).embeddings),
    "mistake": mistake,
}
print(json.dumps(said))
