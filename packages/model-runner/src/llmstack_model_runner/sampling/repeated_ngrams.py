"""Tokens that would repeat a sequence, for `no_repeat_ngram_size`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.logit_masks import IntArray

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that different sequences rarely have one digest


def after_repeated_ngrams(token_ids: npt.NDArray[np.int32], size: int) -> IntArray:
    """The tokens that followed the last `size - 1` tokens before, prompt included, as in transformers.

    The time is linear in the number of tokens, whatever the size: it is that of each step of the row.

    `token_ids`: Prompt and generated tokens so far. [num_tokens]
    """
    if len(token_ids) < size:
        return np.empty(0, dtype=np.int64)
    places = _places_like_the_last(token_ids, size - 1)
    following, firsts = np.unique(token_ids[places + size - 1], return_index=True)
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, size)
    last = token_ids[len(token_ids) - size + 1 :]
    if not (windows[places[firsts], :-1] == last).all():  # another sequence has the same digest
        following = np.unique(windows[(windows[:, :-1] == last).all(axis=1), -1])
    return following.astype(np.int64)


def _places_like_the_last(token_ids: npt.NDArray[np.int32], length: int) -> IntArray:
    """The places where sequences begin with the digest of the last one, which is left out."""
    num_tokens = len(token_ids)
    powers = np.full(num_tokens + 1, _BASE)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)  # modulo 2**64
    sums = np.zeros(num_tokens + 1, dtype=np.uint64)
    np.cumsum(token_ids.astype(np.uint64) * powers[:-1], out=sums[1:])
    num_sequences = num_tokens - length + 1
    # The digest of a sequence is a factor of a difference of sums; the last powers make it independent of its place.
    digests = (sums[length:] - sums[:num_sequences]) * powers[::-1][:num_sequences]
    return np.flatnonzero(digests[:-1] == digests[-1])
