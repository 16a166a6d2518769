"""Guidance: its remote vLLM model, held to a choice and to a pattern. Arguments: URL, model."""

import json
import sys

import guidance
from guidance.models.experimental import VLLMModel

url, model = sys.argv[1:]
NUM_TRIES = 10


def answer(question: str, wanted: object) -> str:
    """What the model is held to. Guidance loses a capture whose last chunk has a token beside end-of-sequence."""
    for _ in range(NUM_TRIES):
        state = VLLMModel(model=model, base_url=url, api_key="none")
        with guidance.user():
            state += question
        with guidance.assistant():
            state += wanted
        if "answer" in state:
            break
    return str(state["answer"])


choice = answer("Is a fox an animal?", guidance.select(["yes", "no"], name="answer"))
age = answer("How old is it?", guidance.gen("answer", regex="[1-9][0-9]?", max_tokens=8))
print(json.dumps({"choice": choice, "age": age}))
