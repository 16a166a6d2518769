"""A tiny random Qwen3-VL with its files, and what transformers answers about videos and pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from picture_model import QUESTION, data_url
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from llmstack_media import Clip, processors, text_of

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32, "patch_size": 16,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2], "initializer_range": 0.2,
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
}  # fmt: skip
VIDEO_PREPROCESSOR = {**PREPROCESSOR, "size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128 * 8}}
SIZE = (80, 56)


def save_video_model(folder: Path) -> None:
    """Writes the checkpoint in the form of the hub."""
    tokenizer = _tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer)}, vision_config=VISION,
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"), tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[[ids("<|image_pad|>"), ids("<|video_pad|>")]] = 0  # no output is a picture
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PREPROCESSOR))


def frames_of(seed: int, count: int) -> list[Image.Image]:
    """Frames of random pixels."""
    width, height = SIZE
    pixels = np.random.default_rng(seed).integers(0, 255, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


def animation(frames: Sequence[Image.Image], milliseconds: int = 250) -> bytes:
    """An animated WebP that keeps every pixel."""
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=frames[1:],
        duration=milliseconds,
        lossless=True,
        minimize_size=False,
    )
    return buffer.getvalue()


def video_url(data: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(data).decode()}"


def frames_url(frames: Sequence[Image.Image]) -> str:
    """vLLM's form of a list of frames."""
    return "data:video/jpeg;base64," + ",".join(data_url(frame).partition(",")[2] for frame in frames)


def reference_answer(
    folder: Path,
    videos: Sequence[tuple[list[Image.Image], float]],
    num_tokens: int,
    pictures: Sequence[Image.Image] = (),
) -> list[int]:
    """Token ids that transformers generates about videos, each with its seconds or 0 for a list, then pictures."""
    files = {
        "preprocessor": PREPROCESSOR,
        "video_preprocessor": VIDEO_PREPROCESSOR,
        "model": {"model_type": "qwen3_vl"},
    }
    ours, tokenizer = processors(**files), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.video is not None
    content: list[dict[str, str]] = []
    inputs: dict[str, list[Any]] = {
        "pixel_values_videos": [],
        "video_grid_thw": [],
        "pixel_values": [],
        "image_grid_thw": [],
    }
    texts = []
    for frames, seconds in videos:
        layout = ours.video.layout(Clip(len(frames), seconds, *SIZE))
        array = ours.video.prepare([np.asarray(frames[index]) for index in layout.frames], layout)
        texts.append(("<|video_pad|>", text_of(ours.video.placeholders(layout))))
        inputs["pixel_values_videos"].append(_values(ours.video, array))
        inputs["video_grid_thw"].append(layout.grid)
        content.append({"type": "video"})
    for one in pictures:
        found = ours.image.layout(*one.size)
        array = ours.image.prepare(np.asarray(one))
        texts.append(("<|image_pad|>", text_of(ours.image.placeholders(found))))
        inputs["pixel_values"].append(_values(ours.image, np.repeat(array, 2, axis=2)))
        inputs["image_grid_thw"].append(found.grid)
        content.append({"type": "image"})
    content.append({"type": "text", "text": QUESTION})
    messages = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    parts, rest = [], prompt
    for symbol, text in texts:
        before, _, rest = rest.partition(symbol)
        parts += [before, text]
    token_ids = tokenizer("".join([*parts, rest]), add_special_tokens=False)["input_ids"]
    kinds = {tokenizer.convert_tokens_to_ids("<|image_pad|>"): 1, tokenizer.convert_tokens_to_ids("<|video_pad|>"): 2}
    given = {
        name: torch.cat(value) if "pixel" in name else torch.tensor(value) for name, value in inputs.items() if value
    }
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    output = model.generate(
        input_ids=torch.tensor([token_ids]), mm_token_type_ids=torch.tensor([[kinds.get(one, 0) for one in token_ids]]),
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, **given,
    )  # fmt: skip
    answer: list[int] = output[0, len(token_ids) :].tolist()
    return answer


def _values(processor: Any, array: np.ndarray) -> torch.Tensor:
    table = processor.value_table()
    values = np.stack([table[channel][array[:, channel]] for channel in range(3)], axis=1)
    return torch.from_numpy(values.reshape(len(values), -1))


def _tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([QUESTION] * 3, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
