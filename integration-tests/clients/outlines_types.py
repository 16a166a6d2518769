"""Outlines: a choice, a pattern, an object of a schema and a grammar, through vLLM's fields. Arguments: URL, model."""

import json
import sys
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict

url, name = sys.argv[1:]


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_small: bool


model = outlines.from_vllm(openai.OpenAI(base_url=url, api_key="none", max_retries=0), name)
question = "Tell me about a fox."
said = {
    "text": model(question, max_tokens=8, temperature=0),
    "choice": model(question, Literal["red", "blue"], max_tokens=8),
    "pattern": model(question, Regex("[0-9]{3}"), max_tokens=8),
    "object": model(question, Animal, max_tokens=60),
    "grammar": model(question, CFG('start: "a" | "b"'), max_tokens=8),
    "pieces": list(model.stream(question, max_tokens=8, temperature=0)),
}
print(json.dumps(said))
