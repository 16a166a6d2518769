"""Known fields of pooling requests that are not available."""

from __future__ import annotations

from collections.abc import Mapping

from llmstack_server.web.peer_fields import PEERS_OF_INPUTS, PEERS_OF_RANKINGS, PEERS_OF_SCORES
from llmstack_server.web.unsupported import MEDIA, Predicate, one_of

_NEVER = one_of()

_PADDING = one_of("do_not_pad")

INPUTS: Mapping[str, Predicate] = {
    **MEDIA,
    **PEERS_OF_INPUTS,
    "chat_template": _NEVER,
    "padding": _PADDING,
    "embed_dtype": one_of("float32"),
    "endianness": one_of("native", "little"),
    "softmax": _NEVER,
    "activation": _NEVER,
}
POOLING: Mapping[str, Predicate] = {**INPUTS, "data": _NEVER}  # for plug-ins of vLLM that read it
PAIRS: Mapping[str, Predicate] = {
    **MEDIA,
    "padding": _PADDING,
    "chat_template": _NEVER,
    "chat_template_kwargs": one_of({}),
    "instruction": _NEVER,
    "softmax": _NEVER,
    "activation": _NEVER,
}
SCORES: Mapping[str, Predicate] = {**PAIRS, **PEERS_OF_SCORES}
COHERE_EMBED: Mapping[str, Predicate] = {
    "request_id": _NEVER,
    "images": one_of([]),
    "inputs": one_of([]),
    "max_tokens": _NEVER,
    "truncate_prompt_tokens": _NEVER,
    "truncation_side": _NEVER,
}
RERANK: Mapping[str, Predicate] = {
    **PAIRS,
    **PEERS_OF_RANKINGS,
    "rank_fields": one_of(["text"]),
    "max_chunks_per_doc": _NEVER,
    "return_embeddings": one_of(False),
}
