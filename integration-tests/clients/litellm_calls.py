"""LiteLLM: chat whole and streamed, a text completion with log-probabilities, and a mistake. Arguments: URL, model."""

import json
import sys

import litellm

litellm.suppress_debug_info = True
url, model = sys.argv[1:]
place = {"api_base": url, "api_key": "none", "temperature": 0, "num_retries": 0}
messages = [{"role": "user", "content": "Tell me about a fox."}]


def chat(name: str = model, **more: object) -> object:
    return litellm.completion(model=f"hosted_vllm/{name}", messages=messages, max_tokens=10, **place, **more)


whole = chat()
streamed = litellm.stream_chunk_builder(
    list(chat(stream=True, stream_options={"include_usage": True})), messages=messages
)
text = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="Once upon a time", max_tokens=5, logprobs=1, **place
)
vectors = litellm.embedding(model=f"hosted_vllm/{model}", input=["a fox"], api_base=url, api_key="none")
try:
    chat("nobody")
    mistake = ""
except litellm.NotFoundError as error:
    mistake = str(error)
said = {
    "whole": whole.choices[0].message.content,
    "whole_usage": whole.usage.total_tokens,
    "streamed": streamed.choices[0].message.content,
    "streamed_usage": streamed.usage.total_tokens,
    "text": text.choices[0].text,
    "text_tokens": text.choices[0].logprobs.tokens,
    "num_dimensions": len(vectors.data[0]["embedding"]),
    "mistake": mistake,
}
print(json.dumps(said))
