"""A tiny random Qwen2-Audio with its processor, and what transformers answers about sounds."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from picture_model import make_tokenizer
from speech_model import sound as window_of_sound

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
    "tie_word_embeddings": False,
}  # fmt: skip
SECONDS, RATE = 4, 16_000
AUDIO = {
    "d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 16,
    "max_source_positions": 50 * SECONDS, "initializer_range": 0.2,
}  # fmt: skip
QUESTION = "what is in this sound?"
LENGTHS = (1.3, 2.5, 0.7, 4.0)


def save_sound_model(folder: Path) -> None:
    """Writes the checkpoint in the form of transformers 5."""
    tokenizer = make_tokenizer(SPECIALS, {})
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    config = transformers.Qwen2AudioConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), "pad_token_id": ids("<|endoftext|>")},
        audio_config=AUDIO, audio_token_index=ids("<|AUDIO|>"),
    )  # fmt: skip
    model = transformers.Qwen2AudioForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[ids("<|AUDIO|>")] = 0  # no output is a sound
    model.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    transformers.Qwen2AudioProcessor(
        feature_extractor=extractor, tokenizer=tokenizer, chat_template=TEMPLATE
    ).save_pretrained(folder)


def sound(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Samples at 16 kHz that 16 bits have exactly, of one of a few lengths."""
    samples = window_of_sound(seed, int(LENGTHS[seed % len(LENGTHS)] * RATE))
    return (np.round(samples * 32768) / 32768).clip(-1, 1 - 2**-15).astype(np.float32)


def wav(samples: Any, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.asarray(samples) * 32768).round().clip(-32768, 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def audio_url(data: bytes) -> dict[str, Any]:
    """vLLM's form of a part."""
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64_of(data)}"}}


def input_audio(data: bytes, name: str = "wav") -> dict[str, Any]:
    """OpenAI's form of a part."""
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": name}}


def parts(seeds: Sequence[int], text: str = QUESTION) -> list[dict[str, Any]]:
    """The content of a message with sounds before its text, in both forms."""
    forms = (input_audio, audio_url)
    sounds = [forms[index % 2](wav(sound(seed))) for index, seed in enumerate(seeds)]
    return [*sounds, {"type": "text", "text": text}]


class SoundReference:
    """Greedy answers of transformers."""

    def __init__(self, folder: Path) -> None:
        self._processor = transformers.AutoProcessor.from_pretrained(folder)
        model_class = transformers.Qwen2AudioForConditionalGeneration
        self._model = model_class.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, seeds: Sequence[int], num_tokens: int, text: str = QUESTION) -> list[int]:
        """Token ids about a message with these sounds before its text."""
        content = [*({"type": "audio"} for _ in seeds), {"type": "text", "text": text}]
        prompt = self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self._processor(
            text=prompt, audio=[sound(seed) for seed in seeds], sampling_rate=RATE, return_tensors="pt"
        )
        output = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
        found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return found
