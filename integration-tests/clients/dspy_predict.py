"""DSPy: a text, and a typed prediction whose answer is held to a schema. Arguments: URL, model."""

import json
import sys
from typing import Literal

import dspy

url, name = sys.argv[1:]
SCHEMA = {
    "type": "object", "required": ["is_small", "colour"], "additionalProperties": False,
    "properties": {"is_small": {"type": "boolean"}, "colour": {"enum": ["red", "grey"]}},
}  # fmt: skip


def model(**settings: object) -> dspy.LM:
    return dspy.LM(
        f"hosted_vllm/{name}", api_base=url, api_key="none", temperature=0, cache=False, num_retries=0, **settings
    )


class Describe(dspy.Signature):
    """Describe an animal."""

    animal: str = dspy.InputField()
    is_small: bool = dspy.OutputField()
    colour: Literal["red", "grey"] = dspy.OutputField()


form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
with dspy.context(lm=model(max_tokens=100, response_format=form), adapter=dspy.JSONAdapter()):
    made = dspy.Predict(Describe)(animal="fox")
[text] = model(max_tokens=12)("Tell me about a fox.")
print(json.dumps({"is_small": made.is_small, "colour": made.colour, "text": text}))
