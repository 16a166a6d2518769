"""Known fields of pooling requests that are not available."""

from __future__ import annotations

from collections.abc import Mapping

from llmstack_server.web.unsupported import Predicate, one_of

_NEVER = one_of()

INPUTS: Mapping[str, Predicate] = {
    "chat_template": _NEVER,
    "mm_processor_kwargs": one_of({}),
    "embed_dtype": one_of("float32"),
    "endianness": one_of("native", "little"),
    "softmax": _NEVER,
    "activation": _NEVER,
}
PAIRS: Mapping[str, Predicate] = {
    "mm_processor_kwargs": one_of({}),
    "chat_template": _NEVER,
    "chat_template_kwargs": one_of({}),
    "instruction": _NEVER,
    "softmax": _NEVER,
    "activation": _NEVER,
}
COHERE_EMBED: Mapping[str, Predicate] = {
    "images": one_of([]),
    "inputs": one_of([]),
    "max_tokens": _NEVER,
    "truncate_prompt_tokens": _NEVER,
    "truncation_side": _NEVER,
}
RERANK: Mapping[str, Predicate] = {
    **PAIRS,
    "rank_fields": one_of(["text"]),
    "max_chunks_per_doc": _NEVER,
    "max_tokens_per_doc": one_of(0),
    "max_tokens_per_query": one_of(0),
    "return_embeddings": one_of(False),
}
