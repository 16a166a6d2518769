"""Tokens that llama.cpp writes, by the library of the wheel `xllamacpp`, in a process of its own.

It ends the process where it does not like a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def llama_cpp_tokens(path: Path, prompt: Sequence[int], num_tokens: int) -> list[dict[int, float]]:
    """For each token that follows the prompt: the likeliest tokens, the chosen one first, and their log-probabilities.

    Raises:
        RuntimeError: llama.cpp does not read the file; the text is the end of what it printed.
    """
    request = {"path": str(path), "prompt": list(prompt), "num_tokens": num_tokens}
    command = [sys.executable, __file__, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-8000:])
    return [{int(key): value for key, value in one.items()} for one in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    import xllamacpp

    request = json.loads(sys.argv[1])
    values = xllamacpp.CommonParams()
    values.model.path = request["path"]
    values.n_ctx, values.n_parallel, values.n_gpu_layers = 64, 1, 0
    values.cpuparams.n_threads = values.cpuparams_batch.n_threads = 1
    values.cache_type_k = values.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    values.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    values.warmup = values.cache_prompt = values.ctx_shift = False
    server = xllamacpp.Server(values)
    answer: Any = server.handle_completions(
        {
            "prompt": request["prompt"], "max_tokens": request["num_tokens"], "temperature": 0.0, "logprobs": 20,
            "cache_prompt": False,
        }
    )  # fmt: skip
    found = [
        {str(one["id"]): one["logprob"] for one in (step, *step["top_logprobs"])}
        for step in answer["choices"][0]["logprobs"]["content"]
    ]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
