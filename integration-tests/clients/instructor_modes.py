"""Instructor: an object in each of the given modes. Arguments: URL, model, modes."""

import json
import sys
import warnings
from collections.abc import Iterable

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

warnings.simplefilter("ignore")
url, model, *names = sys.argv[1:]


class Animal(BaseModel):
    """An animal of a story."""

    model_config = ConfigDict(extra="forbid")
    is_small: bool
    num_legs: int = Field(ge=0, le=4)


def answer(mode: instructor.Mode) -> str:
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    kind = Iterable[Animal] if mode is instructor.Mode.PARALLEL_TOOLS else Animal
    try:
        made = client.create(
            model=model, response_model=kind, max_retries=0, temperature=0, max_tokens=300,
            messages=[{"role": "user", "content": "Tell me about a fox."}],
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 -- the mode's own complaint is part of what is said
        return f"{type(error).__name__}: {error}"[:300]
    return type(made).__name__


print(json.dumps({name: answer(instructor.Mode[name]) for name in names}))
