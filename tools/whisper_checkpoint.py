"""Whisper checkpoints of CTranslate2 in the form of transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = Mapping[str, np.ndarray[Any, Any]]
_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
_SPECIFICATION = ("WhisperSpec", 3)
_MULTILINGUAL = 51_865
"""Tokens of the smallest vocabulary with languages, as in OpenAI's code."""


def read_weights(data: bytes) -> Tensors:
    """The tensors of a `model.bin`, with other names of theirs.

    Raises:
        ValueError: It is no Whisper model, or is damaged.
    """
    place = 0

    def take(form: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(form, data, place)
        place += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal place
        size = take("<H")
        place += size
        return data[place - size : place - 1].decode()

    try:
        take("<I")
        name, revision, found = text(), take("<I"), dict[str, np.ndarray[Any, Any]]()
        if (name, revision) != _SPECIFICATION:
            raise ValueError(f"model.bin has {name[:64]} {revision}, and not {_SPECIFICATION}")
        for _ in range(take("<I")):
            key, rank = text(), take("<B")
            shape = [take("<I") for _ in range(rank)]
            dtype, size = np.dtype(_TYPES[take("<B")]), take("<I")
            found[key] = np.frombuffer(data, dtype, size // dtype.itemsize, place).reshape(shape)
            place += size
        for _ in range(take("<I")):
            other, key = text(), text()
            found[other] = found[key]
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError("model.bin is damaged") from error
    return found


def _renamed(tensors: Tensors) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors under the names of transformers."""
    made = {
        "model.encoder.embed_positions.weight": tensors["encoder/position_encodings/encodings"],
        "model.decoder.embed_positions.weight": tensors["decoder/position_encodings/encodings"],
        "model.decoder.embed_tokens.weight": tensors["decoder/embeddings/weight"],
    }

    def add(source: str, target: str, parts: str = "") -> None:
        """A linear layer, of which `parts` are fused; or a norm. The bias of keys is zero, and not kept."""
        weight = tensors.get(source + "/weight", tensors.get(source + "/gamma"))
        bias = tensors.get(source + "/bias", tensors.get(source + "/beta"))
        if weight is None or bias is None:
            raise ValueError(f"model.bin lacks {source}")
        names = [f"{target}.{part}_proj" for part in parts] or [target]
        for name, rows, numbers in zip(names, np.split(weight, len(names)), np.split(bias, len(names)), strict=True):
            made[name + ".weight"] = rows
            if name.endswith("k_proj"):
                if numbers.any():
                    raise ValueError(f"model.bin has a bias of keys in {source}")
            else:
                made[name + ".bias"] = numbers

    for side in ("encoder", "decoder"):
        add(side + "/layer_norm", f"model.{side}.layer_norm")
        for number in range(_num_layers(tensors, side)):
            source, target = f"{side}/layer_{number}", f"model.{side}.layers.{number}"
            add(source + "/self_attention/layer_norm", target + ".self_attn_layer_norm")
            add(source + "/self_attention/linear_0", target + ".self_attn", "qkv")
            add(source + "/self_attention/linear_1", target + ".self_attn.out_proj")
            if side == "decoder":
                add(source + "/attention/layer_norm", target + ".encoder_attn_layer_norm")
                add(source + "/attention/linear_0", target + ".encoder_attn", "q")
                add(source + "/attention/linear_1", target + ".encoder_attn", "kv")
                add(source + "/attention/linear_2", target + ".encoder_attn.out_proj")
            add(source + "/ffn/layer_norm", target + ".final_layer_norm")
            add(source + "/ffn/linear_0", target + ".fc1")
            add(source + "/ffn/linear_1", target + ".fc2")
    for number in (1, 2):
        add(f"encoder/conv{number}", f"model.encoder.conv{number}")
    return {name: np.ascontiguousarray(tensor) for name, tensor in made.items()}


def _num_layers(tensors: Tensors, side: str) -> int:
    return sum(name.startswith(f"{side}/layer_") and name.endswith("/ffn/linear_1/bias") for name in tensors)


def write_checkpoint(folder: Path, weights: bytes, config: bytes, tokenizer: bytes) -> None:
    """Writes the files that transformers writes.

    Args:
        folder: Exists, and is empty.
        weights: The `model.bin` of CTranslate2.
        config: Its `config.json`.
        tokenizer: Its `tokenizer.json`.

    Raises:
        ValueError: They are no Whisper model.
    """
    from transformers import (  # late: this takes seconds
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperProcessor,
        WhisperTokenizerFast,
    )

    tensors, given = read_weights(weights), json.loads(config)
    renamed = _renamed(tensors)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer)
    ids = {one["content"]: one["id"] for one in json.loads(tokenizer)["added_tokens"]}
    end, start, width = ids["<|endoftext|>"], ids["<|startoftranscript|>"], renamed["model.encoder.conv1.bias"].shape[0]
    named = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    num_heads = int(np.asarray(tensors.get("decoder/num_heads", width // 64)))
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", _num_layers(tensors, side)), ("attention_heads", num_heads), ("ffn_dim", 4 * width)
        )
    }  # fmt: skip
    num_mel_bins = renamed["model.encoder.conv1.weight"].shape[1]
    whisper = WhisperConfig(
        vocab_size=renamed["model.decoder.embed_tokens.weight"].shape[0], num_mel_bins=num_mel_bins, d_model=width,
        max_source_positions=1500, max_target_positions=448, tie_word_embeddings=True, dtype="float16",
        **named, **sizes,
    )  # fmt: skip
    whisper.architectures = ["WhisperForConditionalGeneration"]
    whisper.save_pretrained(folder)
    GenerationConfig(**_generation(given, ids, whisper.vocab_size), **named).save_pretrained(folder)
    # Timestamps are no special tokens: WhisperTokenizer takes the last special id + 1 as <|0.00|>.
    special = [one for one, number in sorted(ids.items(), key=lambda one: one[1]) if end < number <= _no_times(ids)]
    marks = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    made = WhisperTokenizerFast(
        additional_special_tokens=special, tokenizer_file=str(folder / "tokenizer.json"), **marks
    )
    WhisperProcessor(WhisperFeatureExtractor(feature_size=num_mel_bins), made).save_pretrained(folder)


def _no_times(ids: Mapping[str, int]) -> int:
    return ids["<|notimestamps|>"]


def _generation(given: Mapping[str, Any], ids: Mapping[str, int], num_tokens: int) -> dict[str, Any]:
    """The fields of `generation_config.json` that steer the decoder."""
    found: dict[str, Any] = {
        "max_length": 448, "max_initial_timestamp_index": 50, "no_timestamps_token_id": _no_times(ids),
        "prev_sot_token_id": ids["<|startofprev|>"], "return_timestamps": False,
        "suppress_tokens": given["suppress_ids"], "begin_suppress_tokens": given["suppress_ids_begin"],
        "alignment_heads": given["alignment_heads"], "is_multilingual": num_tokens >= _MULTILINGUAL,
    }  # fmt: skip
    if found["is_multilingual"]:
        by_id = {number: token for token, number in ids.items()}
        found["lang_to_id"] = {by_id[number]: number for number in given["lang_ids"]}
        found["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    else:
        found["forced_decoder_ids"] = None
    return found
