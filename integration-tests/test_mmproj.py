"""llama.cpp's two files of a model with pictures, served: the tokens of transformers, and refusals at the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import picture_model
import pytest
from model_folders import model_folder
from picture_model import parts, reference_answer

pytest.importorskip("gguf", reason="the library gguf is not installed")

from model_runner_helpers.mmproj_files import write_two_files
from model_runner_helpers.picture_families import FAMILIES

pytestmark = pytest.mark.full
NUM_TOKENS = 12
ASKED: list[tuple[int, ...]] = [(0,), (1,), (0, 1), (1, 0)]


folder = model_folder(picture_model.save_picture_model)


@pytest.fixture(scope="module")
def files(folder: Path) -> tuple[Path, Path]:
    options = json.loads((folder / "processor_config.json").read_text())["image_processor"]

    def add_tokenizer(writer: Any) -> None:
        found = json.loads((folder / "tokenizer.json").read_text())
        added = {one["content"]: one["id"] for one in found["added_tokens"]}
        token_to_id = found["model"]["vocab"] | added
        tokens = sorted(token_to_id, key=token_to_id.__getitem__)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in added else 1 for token in tokens])
        writer.add_token_merges(
            [" ".join(pair) if isinstance(pair, list) else pair for pair in found["model"]["merges"]]
        )
        writer.add_eos_token_id(token_to_id["<end_of_utterance>"])
        writer.add_chat_template(picture_model.TEMPLATE)

    return write_two_files(folder, replace(FAMILIES["idefics3"], preprocessor=options), add_tokenizer=add_tokenizer)


def test_answers_are_those_of_transformers(folder: Path, files: tuple[Path, Path], serve: Callable[..., Any]) -> None:
    text, pictures = files
    expected = {seeds: reference_answer(folder, seeds, NUM_TOKENS) for seeds in ASKED}
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--max-num-batched-tokens", "48")
    with serve(str(text), "--mmproj", str(pictures), *arguments) as server:
        for _ in range(2):  # then from the prefix cache
            assert {seeds: ask(server, seeds) for seeds in ASKED} == expected


def ask(server: Any, seeds: tuple[int, ...]) -> list[int]:
    answer = server.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": parts(seeds)}], temperature=0, max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    return list(answer.choices[0].token_ids)


def test_a_file_that_is_no_encoder_ends_the_start_in_a_sentence(
    folder: Path, files: tuple[Path, Path], launch: Callable[..., Any], tmp_path: Path
) -> None:
    text, pictures = files
    for model, mmproj, sentence in (
        (text, text, "text.gguf is not supported beside this text model: it has no encoder of pictures."),
        (text, tmp_path / "none.gguf", f"There is no file {tmp_path / 'none.gguf'}."),
        (folder, pictures, f"mmproj.gguf belongs to a text model in a GGUF file, and {folder} is none."),
    ):
        server = launch(str(model), "--mmproj", str(mmproj))
        assert server.process.wait(60) == 2
        assert sentence in server.log
