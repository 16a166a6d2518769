"""Schemas of answers and parameters of queries for the OpenAPI document."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from llmstack_server.web import answer_types as openai
from llmstack_server.web import api_types as api

Schema = dict[str, Any]

_SIMPLE: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
# Routes with their objects. Where the object is None the answer has no JSON.
ANSWERS: Final[Mapping[tuple[str, str], Any]] = {
    ("get", "/health"): api.Status, ("get", "/ready"): api.Status, ("get", "/version"): api.Version,
    ("get", "/load"): api.Load, ("get", "/server_info"): api.ServerInfo, ("get", "/steps"): api.Steps,
    ("get", "/v1/requests/{request_id}/explanation"): api.ExplainedRequest,
    ("post", "/v1/completions"): openai.Completion, ("post", "/v1/chat/completions"): openai.ChatCompletion,
    ("post", "/v1/chat/completions/batch"): openai.ChatCompletion,
    ("post", "/v1/completions/render"): list[openai.Rendered], ("post", "/v1/chat/completions/render"): openai.Rendered,
    ("post", "/v1/estimate"): openai.Estimate,
    ("get", "/v1/models"): openai.ModelList, ("get", "/v1/models/{model}"): openai.Model,
    ("post", "/tokenize"): openai.Tokens, ("post", "/detokenize"): openai.Detokenized,
    ("get", "/tokenizer_info"): dict[str, Any],
    ("post", "/v1/embeddings"): openai.Embeddings, ("post", "/v2/embed"): openai.CohereEmbeddings,
    ("post", "/pooling"): openai.PooledInputs, ("post", "/classify"): openai.Classification,
    ("post", "/score"): openai.Scores, ("post", "/v1/score"): openai.Scores,
    ("post", "/rerank"): openai.Ranking, ("post", "/v1/rerank"): openai.Ranking, ("post", "/v2/rerank"): openai.Ranking,
    ("post", "/v1/responses"): api.ResponseAnswer, ("get", "/v1/responses/{response_id}"): api.ResponseAnswer,
    ("post", "/v1/responses/{response_id}/cancel"): api.ResponseAnswer,
    ("delete", "/v1/responses/{response_id}"): api.Deleted,
    ("get", "/v1/responses/{response_id}/input_items"): api.ItemPage,
    ("post", "/v1/responses/input_tokens"): api.InputTokens,
    ("post", "/v1/messages"): api.Message, ("post", "/v1/messages/count_tokens"): api.CountedTokens,
    ("post", "/v1/files"): api.File, ("get", "/v1/files"): api.FilePage, ("get", "/v1/files/{file_id}"): api.File,
    ("delete", "/v1/files/{file_id}"): api.Deleted,
    ("post", "/v1/batches"): api.Batch, ("get", "/v1/batches"): api.BatchPage,
    ("get", "/v1/batches/{batch_id}"): api.Batch, ("post", "/v1/batches/{batch_id}/cancel"): api.Batch,
    ("post", "/pause"): api.Status, ("post", "/resume"): api.Status, ("get", "/is_paused"): api.Paused,
    ("post", "/abort_requests"): api.Aborted, ("get", "/is_sleeping"): api.Asleep,
    ("post", "/start_profile"): api.Status, ("post", "/stop_profile"): api.StoppedProfile,
    ("post", "/v1/reload"): api.Reloaded,
    # Any of the answers above.
    ("post", "/invocations"): dict[str, Any], ("get", "/v1/streams/{stream_id}"): dict[str, Any],
}  # fmt: skip
_MAX_NUMBER: Final = 10**18 - 1
_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": _MAX_NUMBER}
_TEXT: Final = {"type": "string"}
_ORDER: Final = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}


def _limit(default: int, maximum: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": maximum, "default": default}


# Parameters that the routes read by hand: name, schema and meaning.
QUERIES: Final[Mapping[tuple[str, str], Mapping[str, tuple[Schema, str]]]] = {
    ("get", "/steps"): {
        "after": (_NUMBER, "the last step that is known"), "engine": (_NUMBER, "the index of the engine core"),
        "core": (_TEXT, "the engine core that `after` is of, from an earlier answer"),
    },
    ("get", "/steps/log"): {"engine": (_NUMBER, "the index of the engine core")},
    ("get", "/v1/streams/{stream_id}"): {"after": (_NUMBER, "the last event that is known")},
    ("get", "/v1/responses/{response_id}"): {
        "stream": ({"type": "boolean", "default": False}, "whether the events are sent again"),
        "starting_after": (_NUMBER, "the last event that is known"),
    },
    ("get", "/v1/responses/{response_id}/input_items"): {
        "limit": (_limit(20, 100), "items of a page"), "order": (_ORDER, "the newest first, or the oldest"),
        "after": (_TEXT, "the last item of the page before"),
    },
    ("get", "/v1/files"): {
        "purpose": (_TEXT, "files of this purpose only"), "limit": (_limit(10_000, 10_000), "files of a page"),
        "order": (_ORDER, "the newest first, or the oldest"), "after": (_TEXT, "the last file of the page before"),
    },
    ("get", "/v1/batches"): {
        "limit": (_limit(20, 100), "batches of a page"), "order": (_ORDER, "the newest first, or the oldest"),
        "after": (_TEXT, "the last batch of the page before"),
    },
    ("post", "/pause"): {
        "mode": ({"type": "string", "enum": ["abort", "wait"], "default": "abort"}, "what running requests do"),
        "clear_cache": ({"type": "boolean", "default": True}, "whether the prefix cache is emptied"),
    },
    ("post", "/sleep"): {"level": ({"type": "integer", "enum": [1, 2], "default": 1}, "2 frees the weights too")},
    ("post", "/wake_up"): {
        "tags": ({"type": "array", "items": {"type": "string", "enum": ["weights", "kv_cache"]}}, "what is restored"),
    },
}  # fmt: skip


def add_answers(document: Schema) -> None:
    """Adds the schemas and parameters of all operations of the document."""
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for path, operations in document.get("paths", {}).items():
        for method, operation in operations.items():
            kind = ANSWERS.get((method, path))
            content = operation["responses"]["200"].get("content", {})
            if kind is not None and "application/json" in content:
                content["application/json"]["schema"] = schema_of(kind, components)
            for event_type in content.keys() & {"text/event-stream"}:
                content[event_type]["schema"] = {"type": "string", "description": "server-sent events"}
            for name, (schema, meaning) in QUERIES.get((method, path), {}).items():
                operation.setdefault("parameters", []).append(
                    {"name": name, "in": "query", "required": False, "description": meaning, "schema": schema}
                )


def schema_of(kind: Any, components: dict[str, Schema]) -> Schema:
    """The schema of a type; those of objects go to the components."""
    if kind is Any:
        return {}
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if is_typeddict(kind):
        name = kind.__name__
        if name not in components:
            components[name] = {}  # a type may hold itself
            components[name] = _object_schema(kind, components)
        return {"$ref": f"#/components/schemas/{name}"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return {"type": "array", "items": schema_of(arguments[0], components)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], components) or True}
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(one, components) for one in arguments]}
    raise TypeError(f"no schema for {kind}")


def _object_schema(kind: Any, components: dict[str, Schema]) -> Schema:
    # With annotations as text, `__required_keys__` has all keys.
    hints = get_type_hints(kind, include_extras=True)
    required = sorted(name for name, hint in hints.items() if get_origin(hint) is not NotRequired)
    text = " ".join((kind.__doc__ or "").split())
    return {
        "type": "object",
        "description": text,
        "required": required,
        "properties": {
            name: schema_of(hint if name in required else get_args(hint)[0], components) for name, hint in hints.items()
        },
    }
