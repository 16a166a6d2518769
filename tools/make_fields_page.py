"""Writes docs/request-fields.md: what becomes of each field of vLLM; with --check, says whether it is current."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from generated_page import write_page
from pydantic import BaseModel

from llmstack_server.apis.anthropic.protocol import KNOWN, CountTokensRequest, MessagesRequest
from llmstack_server.apis.openai.protocol import (
    BATCH,
    CHAT,
    COMPLETIONS_OF_VECTORS,
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
from llmstack_server.apis.pooling.unsupported import COHERE_EMBED, INPUTS, PAIRS, POOLING, RERANK
from llmstack_server.apis.responses.protocol import UNSUPPORTED, ResponseRequest
from llmstack_server.web.unsupported import IGNORED, OneOf, Predicate, WordOf

DATA = Path(__file__).resolve().parent / "vllm_request_fields.json"
"""Names and types of the fields of vLLM's request models, of one version."""

ROUTES: Mapping[str, tuple[type[BaseModel], Mapping[str, Predicate]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, CHAT),
    "/v1/chat/completions/batch": (BatchChatRequest, BATCH),
    "/v1/completions": (CompletionRequest, COMPLETIONS_OF_VECTORS),
    "/v1/responses": (ResponseRequest, UNSUPPORTED),
    "/v1/messages": (MessagesRequest, KNOWN),
    "/v1/messages/count_tokens": (CountTokensRequest, KNOWN),
    "/v1/embeddings": (EmbeddingRequest, INPUTS),
    "/v2/embed": (CohereEmbedRequest, COHERE_EMBED),
    "/pooling": (PoolingRequest, POOLING),
    "/classify": (ClassificationRequest, INPUTS),
    "/score": (ScoreRequest, PAIRS),
    "/rerank": (RerankRequest, RERANK),
    "/tokenize": (TokenizeRequest, TOKENIZE),
    "/detokenize": (DetokenizeRequest, {}),
}
STORED: Mapping[str, frozenset[str]] = {"/v1/responses": frozenset({"metadata", "store"})}
"""Fields that have an effect on these routes alone."""

HEAD = """# Fields of requests

Every field of vLLM {version}'s request models, and what becomes of it here.

- *Done* means that it does what it does there.
- *Refused* means 400 `unsupported_parameter`, which names the field. Null is accepted, and so are the values that the
  table gives, because they ask for nothing.
- *No effect* has its reason. A word that the table does not list is 400 `invalid_value`.

Fields that neither vLLM nor OpenAI define are ignored and counted in `llmstack:unknown_request_parameters`. With
`--strict-params` they are refused.

`tools/make_fields_page.py` writes this page from the tables that the server answers with.
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
    if name in model.model_fields:
        return f"done{words}"
    if rule is not None and not words:
        return "refused, except values that change nothing"
    raise KeyError(f"{route}: {name}")


def page() -> str:
    """The whole page."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    parts = [HEAD.format(version=data["version"])]
    for route, fields in data["routes"].items():
        rows = "".join(f"| `{name}` | {verdict(route, name)} |\n" for name in fields)
        parts.append(f"\n## POST {route}\n\n{COLUMNS}{rows}")
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(write_page("request-fields.md", page()))
