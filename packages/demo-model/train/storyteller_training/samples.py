"""Draws samples from a trained network, with the sampling defaults that its folder declares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from storyteller_training.bpe import END, STORYTELLER, USER
from storyteller_training.export import GENERATION_CONFIG
from storyteller_training.gpt2 import Storyteller

REQUESTS = ("Hello", "Who are you?", "Tell me a story about a dragon", "What is the capital of France?")
CONTINUATIONS = ("Once upon a time",)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt as typed and what the model wrote."""

    kind: str
    prompt: str
    text: str


def draw_samples(model: Storyteller, tokenizer: Tokenizer, seed: int, max_tokens: int = 160) -> list[Sample]:
    """Return a sampled and a greedy answer to each request, and a continuation of each beginning."""
    model.eval()
    samples: list[Sample] = []
    for temperature in (float(GENERATION_CONFIG["temperature"]), 0.0):
        how = f"temperature {temperature}" if temperature else "greedy"
        prompts = [(f"chat, {how}", request, f"{USER}{request}{STORYTELLER}") for request in REQUESTS]
        prompts += [(f"completion, {how}", beginning, beginning) for beginning in CONTINUATIONS]
        for index, (kind, prompt, text) in enumerate(prompts):
            generator = torch.Generator().manual_seed(seed + index)
            samples.append(Sample(kind, prompt, complete(model, tokenizer, text, max_tokens, temperature, generator)))
    return samples


def complete(
    model: Storyteller, tokenizer: Tokenizer, text: str, max_tokens: int, temperature: float, generator: torch.Generator
) -> str:
    """Return what follows `text`, up to the end token or `max_tokens` tokens."""
    ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    num_prompt = len(ids)
    end = tokenizer.token_to_id(END)
    with torch.inference_mode():
        while len(ids) - num_prompt < max_tokens and len(ids) < model.config.num_positions:
            token = next_token(model(torch.tensor([ids]))[0, -1], ids, temperature, generator)
            if token == end:
                break
            ids.append(token)
    return str(tokenizer.decode(ids[num_prompt:]))


def next_token(logits: torch.Tensor, ids: list[int], temperature: float, generator: torch.Generator) -> int:
    """Choose the next token: repetition penalty, then greedy, or temperature, top-k and top-p."""
    seen = torch.tensor(sorted(set(ids)))
    penalty = float(GENERATION_CONFIG["repetition_penalty"])
    logits = logits.clone()
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if temperature == 0.0:
        return int(logits.argmax())
    values, indices = torch.topk(logits / temperature, int(GENERATION_CONFIG["top_k"]))
    probabilities = values.softmax(-1)
    probabilities[probabilities.cumsum(-1) - probabilities > float(GENERATION_CONFIG["top_p"])] = 0.0
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])
