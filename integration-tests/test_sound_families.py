"""Voxtral, Qwen2.5-Omni, Gemma 4 and Granite Speech over HTTP: the tokens of transformers, ranks and kills."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_chats import OPTIONS
from model_runner_helpers.picture_families import Picture, PictureFamily, prepare
from model_runner_helpers.sound_families import RATE, SOUND_FAMILIES, SoundFamily
from picture_model import make_tokenizer
from PIL import Image
from safetensors.torch import load_file, save_file
from sound_model import base64_of, input_audio, sound, wav

from llmstack_llm.engine_args import EngineArgs

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
NUM_TOKENS = 12
QUESTION = "what is it?"
LENGTHS = {
    "voxtral": (1.3, 2.7, 0.8), "qwen 2.5 omni": (1.3, 1.9, 0.8), "gemma 4 with sound": (1.3, 1.9, 0.8),
    "granite speech": (1.3, 1.3, 1.3),  # transformers pads those of a prompt, and its encoder attends to that
}  # fmt: skip
ASKED: list[tuple[int, ...]] = [(0,), (1,), (0, 2), (2, 0), (1, 2)]
_AUDIO = {
    "voxtral": "[BEGIN_AUDIO][AUDIO]", "qwen 2.5 omni": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "gemma 4 with sound": "<|audio|>", "granite speech": "<|audio|>",
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'audio' %}AUDIO{% elif c.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[AUDIO]", "[BEGIN_AUDIO]", "<|AUDIO|>", "<|audio_bos|>",
    "<|audio_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio|>", "<|audio>", "<audio|>",
    "<|image>", "<image|>",
]  # fmt: skip
NAMED = {"image_token": "<|IMAGE|>"}
WITH_PICTURES = ("qwen 2.5 omni", "gemma 4 with sound")
WITHOUT_STAGES = ("gemma 4 with sound",)  # later layers read keys of earlier ones
IDS_OF = {
    "gemma 4 with sound": {
        "image_token_id": "<|IMAGE|>", "audio_token_id": "<|audio|>", "video_token_id": "<|VIDEO|>",
    },
    "granite speech": {"audio_token_index": "<|audio|>"},
    "voxtral": {"audio_token_id": "[AUDIO]"},
    "qwen 2.5 omni": {
        "image_token_index": "<|IMAGE|>", "audio_token_index": "<|AUDIO|>", "video_token_index": "<|VIDEO|>",
        "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A checkpoint with its tokenizer; item 2 of a family with pictures is one."""

    name: str
    folder: Path
    family: PictureFamily
    reference: Any

    def is_picture(self, seed: int) -> bool:
        return self.name in WITH_PICTURES and seed == 2

    def part(self, seed: int) -> dict[str, Any]:
        if not self.is_picture(seed):
            return input_audio(wav(self.samples(seed)))
        width, height = self.family.sizes[0]
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(file.getvalue())}"}}

    def samples(self, seed: int) -> Any:
        return sound(3 + 4 * seed)[: int(LENGTHS[self.name][seed] * RATE)]  # one of the longest, cut

    def content(self, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
        return [*map(self.part, seeds), {"type": "text", "text": QUESTION}]

    def item(self, seed: int) -> Picture:
        if self.is_picture(seed):
            return prepare(self.family.ours(), self.family.sizes[0], seed)
        assert isinstance(self.family, SoundFamily)
        samples = self.samples(seed)
        layout = self.family.ours_of_sounds().layout(len(samples))
        item = replace(self.family.item(0).item, layout=layout.grid)
        return Picture([], item, torch.from_numpy(self.family.spectrogram(samples)))

    def answer(self, server: Any, seeds: tuple[int, ...]) -> list[int]:
        """The tokens of transformers for the token ids that the server makes."""
        messages = [{"role": "user", "content": self.content(seeds)}]
        status, tokenized, _ = server.post("/tokenize", {"model": "m", "messages": messages})
        assert status == 200, tokenized
        ids = tokenized["tokens"]
        items = [self.item(seed) for seed in seeds]
        inputs = self.family.inputs([one.values for one in items], [one.item.layout for one in items])
        output = self.reference.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **inputs,
            max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        )  # fmt: skip
        found: list[int] = output[0, len(ids) :].tolist()
        return found


@pytest.fixture(scope="module", params=[*LENGTHS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    name, folder = request.param, tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(SPECIALS, NAMED)
    family, ids = SOUND_FAMILIES[name], tokenizer.convert_tokens_to_ids
    config = copy.deepcopy(dict(family.config)) | {key: ids(token) for key, token in IDS_OF[name].items()}
    text = config["text_config"]
    text |= {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = len(tokenizer)
    family = replace(family, config=config)
    reference = family.write(folder, is_hub=False)
    tokenizer.chat_template = _TEMPLATE.replace("AUDIO", _AUDIO[name])
    tokenizer.save_pretrained(folder)
    return Served(name, folder, family, reference)


def ask(server: Any, content: Any, model: str = "m") -> list[int]:
    answer = server.client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    return list(answer.choices[0].token_ids)


def options(*more: str) -> tuple[str, ...]:
    return (*OPTIONS, *more)


def test_answers_are_those_of_transformers_alone_together_and_after_a_kill(
    served: Served, serve: Callable[..., Any]
) -> None:
    with serve(str(served.folder), *options("--max-num-batched-tokens", "23")) as server:
        expected = {seeds: served.answer(server, seeds) for seeds in ASKED}
        assert len({tuple(found) for found in expected.values()}) >= len(expected) - 1
        assert {seeds: ask(server, served.content(seeds)) for seeds in ASKED} == expected
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(ask, server, served.content(seeds)) for seeds in ASKED * 3]
            server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0, "the requests")
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert [one.result() for one in waiting] == [*expected.values()] * 3


@pytest.mark.parametrize("ranks", [("-tp", "2"), ("-pp", "2")])
def test_two_ranks_give_the_same_tokens(ranks: tuple[str, ...], served: Served, serve: Callable[..., Any]) -> None:
    if ranks[0] == "-pp" and served.name in WITHOUT_STAGES:
        pytest.skip("layers of this model cannot be divided into stages")
    with serve(str(served.folder), *options(*ranks)) as server:
        for seeds in ((1,), (0, 2)):
            assert ask(server, served.content(seeds)) == served.answer(server, seeds)


def save_adapter(folder: Path) -> None:
    """An adapter of the language model, beside the model's own files as published ones are."""
    generator, factors = torch.Generator().manual_seed(3), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "language_model" in name and name.endswith(("q_proj.weight", "down_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for letter, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                factors[f"{module}.lora_{letter}.weight"] = torch.randn(shape, generator=generator) * 0.4
    save_file(factors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "down_proj"],
              "base_model_name_or_path": "m"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("served", ["granite speech"], indirect=True)
def test_the_adapter_of_granite_speech_is_that_of_prompts_with_sound(
    served: Served, serve: Callable[..., Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(served.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"has_lora_adapter": True}
    (folder / "config.json").write_text(json.dumps(config))
    save_adapter(folder)
    with pytest.raises(ValueError, match="this model has an adapter for prompts with sound: give --enable-lora and"):
        EngineArgs(str(folder)).create_engine_config()
    adapters = ("--enable-lora", "--default-mm-loras", json.dumps({"audio": str(folder)}))
    with serve(str(folder), *options(*adapters)) as server:
        found = ask(server, served.content((0,)))
        assert found == ask(server, served.content((0,)), "audio") != served.answer(server, (0,))
        assert ask(server, served.content(())) == served.answer(server, ())
