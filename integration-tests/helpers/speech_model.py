"""A tiny Whisper checkpoint with random weights and short windows, and transformers' answers to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(300, 309)
SECONDS, NUM_STATES = 2, 100
VOCAB_SIZE = NO_TIMESTAMPS + 1 + NUM_STATES + 1
WINDOW = SECONDS * 16_000
GENERATION: dict[str, Any] = {
    "eos_token_id": END, "pad_token_id": END, "bos_token_id": END, "decoder_start_token_id": START,
    "no_timestamps_token_id": NO_TIMESTAMPS, "prev_sot_token_id": PREVIOUS, "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "max_initial_timestamp_index": 50,
    "alignment_heads": [[1, 0], [1, 2]], "begin_suppress_tokens": [7, END],
    "suppress_tokens": [1, 2, START, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH],
}  # fmt: skip


def save_speech_model(folder: Path) -> None:
    """Writes the checkpoint; matrices are wide enough for varied answers."""
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE, num_mel_bins=80, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_source_positions=NUM_STATES, max_target_positions=64, pad_token_id=END, bos_token_id=END,
        eos_token_id=END, decoder_start_token_id=START, suppress_tokens=None, begin_suppress_tokens=None,
        init_std=0.25,
    )  # fmt: skip
    torch.manual_seed(1)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    feature_extractor().save_pretrained(folder)


def feature_extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)


def sound(seed: int, num_samples: int = WINDOW) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A few tones that come and go, and noise."""
    random = np.random.default_rng(seed)
    seconds = np.arange(num_samples) / 16_000
    tones = [
        random.uniform(0.05, 0.3) * np.sin(2 * np.pi * random.uniform(80, 4000) * seconds)
        * (np.sin(2 * np.pi * random.uniform(0.5, 3) * seconds) > 0)
        for _ in range(4)
    ]  # fmt: skip
    return (sum(tones) + 0.01 * random.standard_normal(num_samples)).astype(np.float32)


def speech_prompt(samples: Any, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"prompt_token_ids": list(token_ids), "multi_modal_data": {"audio": (samples, 16_000)}}


class SpeechReference:
    """Greedy answers of transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self._generation = self._model.generation_config

    @torch.no_grad()
    def logits(self, samples: Any, token_ids: Sequence[int]) -> torch.Tensor:  # [num_tokens, vocab_size]
        features = self._extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
        found: torch.Tensor = self._model(features, decoder_input_ids=torch.tensor([[*token_ids]])).logits[0]
        return found

    @torch.no_grad()
    def alignment(self, samples: Any, token_ids: Sequence[int]) -> Any:  # [num_tokens, num_heads, num_states]
        """Weights of the heads that follow the sound."""
        features = self._extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
        self._model.set_attn_implementation("eager")
        given = {"decoder_input_ids": torch.tensor([[*token_ids]]), "output_attentions": True}
        found = self._model(features, **given).cross_attentions
        self._model.set_attn_implementation("sdpa")
        return torch.stack([found[layer][0, head] for layer, head in GENERATION["alignment_heads"]], dim=1).numpy()

    @torch.no_grad()
    def answer(
        self, samples: Any, token_ids: Sequence[int], num_tokens: int, num_states: int = NUM_STATES
    ) -> list[int]:
        """Tokens under transformers' own rules, up to the end token; of the first states of a window alone."""
        features = self._extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
        encoded = self._encoded(features, num_states)
        rules = self._rules(token_ids)
        answer: list[int] = []
        while len(answer) < num_tokens and answer[-1:] != [self._generation.eos_token_id]:
            known = torch.tensor([[*token_ids, *answer]])
            scores = self._model(encoder_outputs=encoded, decoder_input_ids=known).logits[:, -1]
            for rule in rules:
                scores = rule(known, scores)
            answer.append(int(scores.argmax()))
        return answer

    @torch.no_grad()
    def beams(
        self, samples: Any, token_ids: Sequence[int], num_tokens: int, width: int, **options: Any
    ) -> list[tuple[list[int], float]]:
        """The beams of transformers' search up to and with the end token, each with its score."""
        features = self._extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
        generation = GenerationConfig(
            num_beams=width, num_return_sequences=width, max_new_tokens=num_tokens, do_sample=False,
            eos_token_id=self._generation.eos_token_id, pad_token_id=self._generation.eos_token_id,
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        found = GenerationMixin.generate(
            self._model, features, decoder_input_ids=torch.tensor([[*token_ids]]), generation_config=generation,
            logits_processor=LogitsProcessorList(self._rules(token_ids)),
        )  # fmt: skip
        beams = []
        for one, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
            answer = one[len(token_ids) :]
            end = answer.index(generation.eos_token_id) if generation.eos_token_id in answer else num_tokens
            beams.append((answer[: end + 1], score))
        return beams

    def _rules(self, token_ids: Sequence[int]) -> list[Any]:
        rules: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(self._generation.begin_suppress_tokens, len(token_ids)),
            SuppressTokensLogitsProcessor(self._generation.suppress_tokens),
        ]
        if token_ids[-1] != self._generation.no_timestamps_token_id:
            rules.append(WhisperTimeStampLogitsProcessor(self._generation, begin_index=len(token_ids)))
        return rules

    def _encoded(self, features: torch.Tensor, num_states: int) -> Any:
        encoder = self._model.model.encoder
        positions, most = encoder.embed_positions, encoder.config.max_source_positions
        encoder.embed_positions = torch.nn.Embedding.from_pretrained(positions.weight[:num_states])
        encoder.config.max_source_positions = num_states
        try:
            return encoder(features[:, :, : 2 * num_states])
        finally:
            encoder.embed_positions, encoder.config.max_source_positions = positions, most
