"""A tiny random SmolVLM with its processor, and what transformers answers about pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]  # fmt: skip
NAMED = {
    "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
    "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 16, "initializer_range": 0.2,
}  # fmt: skip
QUESTION = "what is in this picture?"


def save_picture_model(folder: Path) -> None:
    """Writes the checkpoint in the form of transformers 5."""
    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    config = transformers.Idefics3Config(
        text_config={**TEXT, "vocab_size": len(tokenizer), "pad_token_id": ids("<|endoftext|>")},
        vision_config=VISION, scale_factor=2, image_token_id=ids("<image>"), pad_token_id=ids("<|endoftext|>"),
    )  # fmt: skip
    model = transformers.Idefics3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[ids("<image>")] = 0  # no output is a picture
    model.save_pretrained(folder)
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    transformers.Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=4, chat_template=TEMPLATE
    ).save_pretrained(folder)


def picture(seed: int, width: int = 70, height: int = 50) -> Image.Image:
    """A picture of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def data_url(image: Image.Image) -> str:
    """The picture as a PNG in a URL."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def parts(seeds: Sequence[int], text: str = QUESTION) -> list[dict[str, Any]]:
    """The content of a message with pictures before its text."""
    urls = [{"type": "image_url", "image_url": {"url": data_url(picture(seed))}} for seed in seeds]
    return [*urls, {"type": "text", "text": text}]


def reference_answer(folder: Path, seeds: Sequence[int], num_tokens: int, text: str = QUESTION) -> list[int]:
    """The token ids that transformers generates greedily about such a message."""
    model, inputs = _reference(folder, seeds, text, has_answer=True)
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def reference_vector(folder: Path, seeds: Sequence[int], text: str = QUESTION) -> np.ndarray:
    """The last hidden state of transformers at the end of such a message, of length 1."""
    model, inputs = _reference(folder, seeds, text, has_answer=False)
    with torch.no_grad():
        state = model(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
    found: np.ndarray = (state / state.norm()).numpy()
    return found


def reference_features(folder: Path, image: Image.Image) -> torch.Tensor:
    """The vectors that transformers puts in place of a picture which is not split, [vectors, width]."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = processor.image_processor([[image]], do_image_splitting=False, return_tensors="pt")
    with torch.no_grad():
        found = model.model.get_image_features(
            **{name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
        )
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in found.pooler_output])


def _reference(folder: Path, seeds: Sequence[int], text: str, *, has_answer: bool) -> tuple[Any, Any]:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    content = [*({"type": "image"} for _ in seeds), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=has_answer)
    return model, processor(text=prompt, images=[[picture(seed) for seed in seeds]], return_tensors="pt")


def make_tokenizer(specials: Sequence[str] = SPECIALS, named: Mapping[str, str] = NAMED) -> Any:
    """A tokenizer of bytes and a few words, with these special tokens, of which some have a name."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([QUESTION] * 3, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=specials[2], pad_token=specials[0], bos_token=specials[1],
        extra_special_tokens=dict(named),
    )  # fmt: skip
