"""`/v1/decisions` with a trained model: probabilities equal those of the model's logits, by OpenAI's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

STATE = "The fox came to the well. It was dry, and so the fox went home without a drink. " * 6
LEVELS = ["calm", "annoyed", "furious"]
QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "dry", "instructions": "The well was dry."},
    {"type": "choice", "name": "who", "instructions": "Who came?",
     "choices": [{"value": "a wolf"}, {"value": "a fox", "description": "with a red tail"}, {"value": False}]},
    {"type": "score", "instructions": "How was the fox?", "levels": [{"label": label} for label in LEVELS]},
]  # fmt: skip
ENDING = "\n\nAnswer with one letter alone."
SHOWN = [
    "Question: The well was dry.\nA. false\nB. true",
    "Question: Who came?\nA. a wolf\nB. a fox: with a red tail\nC. false",
    "Question: How was the fox?\nA. calm\nB. annoyed\nC. furious",
]


def expected_logprobs() -> list[list[float]]:
    """By transformers: the log-probabilities of the letters at the start of the answer to each question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llmstack_demo_model import model_path

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    found = []
    for shown in SHOWN:
        content = f"{STATE}\n\n{shown}{ENDING}"
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        letters = []
        for label in "ABC"[: shown.count("\n")]:
            *head, letter = tokenizer(text + label, add_special_tokens=False)["input_ids"]
            assert head == token_ids
            letters.append(letter)
        with torch.no_grad():
            logprobs = model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
        found.append([float(logprobs[letter]) for letter in letters])
    return found


def test_probabilities_are_those_of_transformers(serve: Callable[..., Any]) -> None:
    import torch

    with serve("--dtype", "float32") as server:
        dry, who, mood = server.client.decisions.create(model="llmstack-demo", input=STATE, questions=QUESTIONS).answers
    logprobs = [torch.tensor(one, dtype=torch.float64) for one in expected_logprobs()]
    shares = [one.softmax(0).tolist() for one in logprobs]
    assert (dry.type, dry.name) == ("predicate", "dry")
    assert dry.probability == pytest.approx(shares[0][1], abs=2e-5)
    assert [one.value for one in who.probabilities] == ["a wolf", "a fox", False]
    assert [one.probability for one in who.probabilities] == pytest.approx(shares[1], abs=2e-5)
    assert who.choice == ["a wolf", "a fox", False][shares[1].index(max(shares[1]))]
    assert who.confidence == pytest.approx(float(logprobs[1].max().exp()), abs=2e-5)
    assert [one.label for one in mood.probabilities] == LEVELS
    assert mood.score == pytest.approx(shares[2][1] + 2 * shares[2][2], abs=2e-5)


def test_the_input_is_computed_once(demo_server: Any) -> None:
    fields: dict[str, Any] = {"model": "llmstack-demo", "input": f"Again: {STATE}", "questions": QUESTIONS}
    first = demo_server.client.decisions.create(**fields)
    again = demo_server.client.decisions.create(**fields)
    assert first.answers == again.answers, "a hit changes no bit"
    num_tokens = first.usage.input_tokens
    assert first.usage.output_tokens == 3
    assert 0.45 * num_tokens < first.usage.input_tokens_details.cached_tokens < num_tokens * 2 / 3
    assert again.usage.input_tokens_details.cached_tokens > 0.9 * num_tokens
