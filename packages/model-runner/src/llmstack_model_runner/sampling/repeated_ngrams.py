"""Tokens that would repeat a sequence, for `no_repeat_ngram_size`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.logit_masks import IntArray


def after_repeated_ngrams(token_ids: npt.NDArray[np.int32], size: int) -> IntArray:
    """The tokens that followed the last `size - 1` tokens before, prompt included, as in transformers.

    `token_ids`: Prompt and generated tokens so far. [num_tokens]
    """
    if len(token_ids) < size:
        return np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, size)
    is_same = (windows[:, :-1] == token_ids[len(token_ids) - size + 1 :]).all(axis=1)
    return np.unique(windows[is_same, -1]).astype(np.int64)
