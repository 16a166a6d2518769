"""Serves a checkpoint through transformers' continuous batching, for comparisons."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from typing import Any

import front
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

# An id that no token has: nothing ends a request early.
NO_TOKEN = -1


class Engine:
    """Hands requests to transformers' manager, which steps in a thread of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self._model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=options.dtype).eval()
        self._batching = ContinuousBatchingConfig(
            num_blocks=options.num_blocks, max_batch_tokens=options.max_batch_tokens
        )
        self._request_ids = itertools.count()

    def start(self) -> None:
        config = GenerationConfig(do_sample=False, eos_token_id=self._model.config.eos_token_id, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(config, self._batching)
        self._manager.start()

    def add(self, token_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> asyncio.Queue[list[int] | None]:
        tokens: asyncio.Queue[list[int] | None] = asyncio.Queue()
        num_sent = 0

        def take(output: Any) -> None:
            nonlocal num_sent
            if new := output.generated_tokens[num_sent:]:
                num_sent += len(new)
                tokens.put_nowait(new)
            if output.is_finished():
                tokens.put_nowait(None)

        request_id = f"r{next(self._request_ids)}"
        self._manager.register_result_handler(request_id, take)
        self._manager.add_request(
            token_ids,
            request_id=request_id,
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=NO_TOKEN if ignore_eos else None,
        )
        return tokens


def main() -> None:
    parser = front.parser(__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-blocks", type=int, default=256, help="of the KV cache (default: 256)")
    parser.add_argument("--max-batch-tokens", type=int, default=1024)
    options = parser.parse_args()
    front.serve(options, Engine(options))


if __name__ == "__main__":
    main()
