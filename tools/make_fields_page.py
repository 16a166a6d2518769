"""Writes docs/request-fields.md: what becomes of each field of other servers; --check says whether it is current."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from generated_page import write_page
from pydantic import BaseModel

from llmstack_server.apis.anthropic.protocol import KNOWN, CountTokensRequest, MessagesRequest
from llmstack_server.apis.llama_cpp.protocol import FIELDS as INFILL
from llmstack_server.apis.llama_cpp.protocol import InfillRequest
from llmstack_server.apis.openai.protocol import (
    BATCH,
    CHAT,
    COMPLETIONS_OF_VECTORS,
    DETOKENIZE,
    TOKENIZE,
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from llmstack_server.apis.pooling.protocol import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from llmstack_server.apis.pooling.unsupported import COHERE_EMBED, INPUTS, POOLING, RERANK, SCORES
from llmstack_server.apis.responses.protocol import UNSUPPORTED, ResponseRequest
from llmstack_server.web.unsupported import IGNORED, OneOf, Predicate, WordOf

TOOLS = Path(__file__).resolve().parent
SERVERS = tuple(
    json.loads((TOOLS / f"{name}_request_fields.json").read_text(encoding="utf-8"))
    for name in ("vllm", "sglang", "llama_cpp", "tgi")
)
"""Names and types of the fields of other servers' requests, each of one version; vLLM's first."""

ROUTES: Mapping[str, tuple[type[BaseModel], Mapping[str, Predicate]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, CHAT),
    "/v1/chat/completions/batch": (BatchChatRequest, BATCH),
    "/v1/completions": (CompletionRequest, COMPLETIONS_OF_VECTORS),
    "/infill": (InfillRequest, INFILL),
    "/v1/responses": (ResponseRequest, UNSUPPORTED),
    "/v1/messages": (MessagesRequest, KNOWN),
    "/v1/messages/count_tokens": (CountTokensRequest, KNOWN),
    "/v1/embeddings": (EmbeddingRequest, INPUTS),
    "/v2/embed": (CohereEmbedRequest, COHERE_EMBED),
    "/pooling": (PoolingRequest, POOLING),
    "/classify": (ClassificationRequest, INPUTS),
    "/score": (ScoreRequest, SCORES),
    "/rerank": (RerankRequest, RERANK),
    "/tokenize": (TokenizeRequest, TOKENIZE),
    "/detokenize": (DetokenizeRequest, DETOKENIZE),
}
STORED: Mapping[str, frozenset[str]] = {"/v1/responses": frozenset({"metadata", "store"})}
"""Fields that have an effect on these routes alone."""

_LOGS = "it names the request in logs and metrics there"
_PLACE = "it chooses where a request runs"
_CACHE = "cached prefixes are always used"
_WHOLE = "no token of a prompt is dropped while it is answered"
_WORK = "it is about how the server works or reports"
COUNTED: Mapping[str, str] = {
    **dict.fromkeys(("rid", "custom_labels"), _LOGS),
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "id_slot"), _PLACE),
    **dict.fromkeys(("cache_prompt", "n_cache_reuse"), _CACHE),
    **dict.fromkeys(("n_keep", "n_discard"), _WHOLE),
    **dict.fromkeys(
        ("timings_per_token", "return_progress", "sse_ping_interval", "verbose", "backend_sampling"), _WORK
    ),
    "return_flat_raw_top_logprobs_b64": "it is the form of a field that is refused",
}
"""Fields of servers other than vLLM that change no answer, and why; the server counts them as unknown."""

UNUSED: Mapping[str, str] = {"betas": "what it asks for is on, or is refused where it is used"}
"""Known fields without effect that are in no table of the server's."""

HEAD = """# Fields of requests

Every field of the requests of {servers}, and what becomes of it here.

- *Done* means that it does what it does there.
- *Refused* means 400 `unsupported_parameter`, which names the field. Null is accepted, and so are the values that the
  table gives, because they ask for nothing.
- *No effect* has its reason. A word that the table does not list is 400 `invalid_value`.
- *Ignored* has its reason, too. It is counted as the fields that no server defines.

Fields that neither OpenAI nor one of these servers define are ignored and counted in
`llmstack:unknown_request_parameters`. With `--strict-params` they are refused.

`tools/make_fields_page.py` writes this page from the tables that the server answers with.
"""
OTHERS = """
# Further fields of {server}

Those that the tables above do not have.
"""
COLUMNS = "| field | here |\n|---|---|\n"


def verdict(route: str, name: str) -> str:
    """What becomes of a field.

    Raises:
        KeyError: The field is neither declared nor in a table.
    """
    model, table = ROUTES[route]
    rule = table.get(name)
    if isinstance(rule, OneOf):
        values = ", ".join(f"`{json.dumps(value)}`" for value in rule.values)
        return f"refused, except {values}" if values else "refused"
    words = ""
    if isinstance(rule, WordOf):
        words = f"; one of {', '.join(f'`{word}`' for word in rule.words)}"
    if name in IGNORED and name not in STORED.get(route, ()):
        return f"no effect: {IGNORED[name]}{words}"
    if name in UNUSED:
        return f"no effect: {UNUSED[name]}"
    if name in model.model_fields:
        return f"done{words}"
    if rule is not None and not words:
        return "refused, except values that change nothing"
    if name in COUNTED:
        return f"ignored: {COUNTED[name]}"
    raise KeyError(f"{route}: {name}")


def page() -> str:
    """The whole page."""
    names = [f"{server['engine']} {server['version']}" for server in SERVERS]
    parts = [HEAD.format(servers=f"{', '.join(names[:-1])} and {names[-1]}")]
    seen: set[tuple[str, str]] = set()
    for server in SERVERS:
        if seen:
            parts.append(OTHERS.format(server=server["engine"]))
        for route, fields in server["routes"].items():
            new = [name for name in fields if (route, name) not in seen]
            seen.update((route, name) for name in new)
            rows = "".join(f"| `{name}` | {verdict(route, name)} |\n" for name in new)
            parts.append(f"\n## POST {route}\n\n{COLUMNS}{rows}" if rows else "")
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(write_page("request-fields.md", page()))
