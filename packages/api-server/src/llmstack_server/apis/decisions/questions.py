"""Questions about a text, and their answers from log-probabilities."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from llmstack_llm import request_errors
from llmstack_types.json_values import JSONObject

LABELS: Final = string.ascii_uppercase
"""A question's options have one each, in their order. So many options a question may have."""

QuestionKind = Literal["predicate", "choice", "score"]


class Option(NamedTuple):
    """One of the answers to a question: what an answer calls it, and what the model reads of it."""

    value: str | bool | int
    text: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that is answered by one of its options.

    Attributes:
        name: Repeated in the answer; None for a question without.
        options: Of a score its levels, lowest first; of a predicate false and true.
    """

    kind: QuestionKind
    instructions: str
    name: str | None
    options: tuple[Option, ...]

    def prompt(self, state: str, *, is_continued: bool) -> str:
        """The prompt of the question: the input first, so that all questions about it share a prefix.

        `is_continued`: The answer continues this text, and is no message of its own.
        """
        lines = [state, "", f"Question: {self.instructions}"]
        for label, option in zip(LABELS, self.options, strict=False):
            lines.append(f"{label}. {option.text}" + (f": {option.description}" if option.description else ""))
        lines += ["", "Answer with one letter alone."]
        return "\n".join([*lines, "Answer:"] if is_continued else lines)

    def answer(self, logprobs: Sequence[float]) -> JSONObject:
        """The answer by the log-probability of each option's label among all tokens.

        Raises:
            InvalidRequestError: The model can give none of the labels.
        """
        best = max(range(len(logprobs)), key=logprobs.__getitem__)
        if logprobs[best] == -math.inf:
            raise request_errors.unsupported_value("questions", "this model never says a letter there")
        weights = [math.exp(logprob - logprobs[best]) for logprob in logprobs]
        total = math.fsum(weights)
        probabilities = [weight / total for weight in weights]
        head: JSONObject = {"type": self.kind, "name": self.name}
        if self.kind == "predicate":
            return head | {"probability": probabilities[1]}
        confidence = math.exp(logprobs[best])
        pairs = list(zip(self.options, probabilities, strict=True))
        if self.kind == "choice":
            shares = [{"value": option.value, "probability": share} for option, share in pairs]
            return head | {"choice": self.options[best].value, "probabilities": shares, "confidence": confidence}
        levels = [{"value": option.value, "label": option.text, "probability": share} for option, share in pairs]
        score = math.fsum(level * share for level, share in enumerate(probabilities))
        return head | {"score": score, "probabilities": levels, "confidence": confidence}
