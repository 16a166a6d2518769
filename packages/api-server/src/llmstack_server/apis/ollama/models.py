"""Routes of Ollama's API about models and the server."""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from llmstack_server.apis.ollama.names import Fields, without_tag
from llmstack_server.apis.ollama.protocol import ShowRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.checks import check_model
from llmstack_server.web.fields import parse

COMPATIBLE_VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients compare it with what they need."""
# Models stay loaded; the time is far enough for a client that shows how long is left.
_NEVER = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC).isoformat()
_WEIGHT_FILES = (".safetensors", ".gguf")


def model_tags(states: Iterable[ServerState]) -> Fields:
    """All served names of these models, and those of adapters."""
    return {"models": [_model_object(state, name) for state in states for name in _names(state)]}


def running_models(states: Iterable[ServerState]) -> Fields:
    """The loaded ones of these models; each is, once its engine is ready."""
    models = []
    for state in states:
        ready = state.ready
        if ready is None:
            continue
        is_on_card = not ready.device.startswith("cpu")
        for name in _names(state):
            found = _model_object(state, name)
            del found["modified_at"]
            models.append({
                **found, "expires_at": _expiry(state), "size_vram": found["size"] if is_on_card else 0,
                "context_length": ready.max_model_len,
            })  # fmt: skip
    return {"models": models}


def _expiry(state: ServerState) -> str:
    """When the engine falls asleep if no request comes."""
    left_s = None if state.idle is None else state.idle.seconds_left()
    if left_s is None:
        return _NEVER
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=left_s)).isoformat()


async def show_model(state: ServerState, body: Fields) -> Fields:
    """The facts of one model.

    Raises:
        InvalidRequestError: It is not served.
    """
    fields = parse(ShowRequest, without_tag(state, {"model": body.get("name"), **body}))
    check_model(state, fields.model)
    found, ready = _model_object(state, fields.model or state.served_model_name), state.ready
    family = found["details"]["family"]
    facts: Fields = {"general.architecture": family}
    if ready is not None:
        facts |= {f"{family}.context_length": ready.max_model_len, f"{family}.vocab_size": ready.vocab_size}
        if ready.embedding_size:
            facts[f"{family}.embedding_length"] = ready.embedding_size
    defaults = state.sampling_defaults()
    return {
        "modelfile": "", "template": "", "license": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
        "details": found["details"], "model_info": facts, "capabilities": _capabilities(state),
        "modified_at": found["modified_at"],
    }  # fmt: skip


def _names(state: ServerState) -> list[str]:
    adapters = [] if state.opened_engine is None else [one.name for one in state.opened_engine.adapters.adapters]
    return [*state.config.served_model_names, *adapters]


def _model_object(state: ServerState, name: str) -> Fields:
    ready = state.ready
    backends = {} if ready is None else ready.backends
    family = str(state.facts.get("model_type", ""))
    scheme = backends.get("quantization", "").partition(" ")[0]  # such as `gguf` of `gguf of the checkpoint`
    # Other names of the same weights have their digest.
    digest = backends.get("weights") or state.system_fingerprint
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.datetime.fromtimestamp(state.created, datetime.UTC).isoformat(),
        "size": 0 if ready is None else _num_weight_bytes(ready.model_path),
        "digest": hashlib.sha256(digest.encode()).hexdigest(),
        "details": {
            "parent_model": "", "format": "gguf" if scheme == "gguf" else "safetensors", "family": family,
            "families": [family] if family else [], "parameter_size": "",
            "quantization_level": scheme or ("" if ready is None else ready.dtype),
        },
    }  # fmt: skip


@functools.lru_cache(maxsize=64)  # of each model that a server may have: in every list, of each name
def _num_weight_bytes(model_path: str) -> int:
    """Bytes of the files with weights; 0 where the folder has none, or is away."""
    path = Path(model_path)
    try:
        files = [path] if path.is_file() else list(path.iterdir()) if model_path else []
        return sum(one.stat().st_size for one in files if one.suffix in _WEIGHT_FILES)
    except OSError:
        return 0


def _capabilities(state: ServerState) -> list[str]:
    """The names that Ollama has for abilities."""
    ready, engine = state.ready, state.opened_engine
    if ready is None or engine is None:
        return []
    if not ready.is_generative:
        return ["embedding"]
    facts, parsers = engine.chat_facts, state.chat_parsers
    has_pictures = facts is not None and facts.pictures is not None
    offered = {
        "completion": True, "vision": has_pictures, "tools": parsers.tool is not None,
        "thinking": parsers.reasoning is not None,
    }  # fmt: skip
    return [name for name, is_offered in offered.items() if is_offered]
