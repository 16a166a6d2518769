"""Named workloads, so that two comparisons of servers use the same load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """Values of flags; the command line overrides them.

    Attributes:
        flags: Name of a flag, with `_`, to its value.
    """

    description: str
    flags: dict[str, Any]


def _random(num_prompts: int, input_len: int, output_len: int, concurrency: int, prefix_len: int = 0) -> dict[str, Any]:
    return {
        "dataset_name": "random",
        "num_prompts": num_prompts,
        "random_input_len": input_len,
        "random_output_len": output_len,
        "random_prefix_len": prefix_len,
        "max_concurrency": concurrency,
        "num_warmups": concurrency,
        "ignore_eos": True,
        "temperature": 0.0,
    }


PRESETS: dict[str, Preset] = {
    "w1": Preset("single stream: prompt 32, output 128, one at a time", _random(4, 32, 128, 1)),
    "w2": Preset("prefill: prompt 900, output 1, one at a time", _random(8, 900, 1, 1)),
    "w3-c8": Preset("64 requests of 128 + 128 tokens, 8 at once", _random(64, 128, 128, 8)),
    "w3-c32": Preset("64 requests of 128 + 128 tokens, 32 at once", _random(64, 128, 128, 32)),
    "w4": Preset(
        "64 requests behind one prefix of 512 tokens, 32 own, output 32, 16 at once", _random(64, 32, 32, 16, 512)
    ),
    "w-image": Preset(
        "8 streams of 32 + 128 tokens, with and without a picture of 2048 x 2048 that arrives meanwhile",
        _random(8, 32, 128, 9)
        | {"dataset_name": "pictures", "max_concurrency": None, "endpoint": "/v1/chat/completions"},
    ),
}
