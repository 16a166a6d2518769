"""The model that makes draft tokens, beside the served one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_llm.model.config import ModelConfig, ModelConfigError, load_model_config


def draft_model_fields(speculative: Mapping[str, Any] | None, served: ModelConfig) -> dict[str, Any]:
    """The fields of a `ModelRunnerConfig` for the draft model that a checked `--speculative-config` names, if any.

    Raises:
        ModelConfigError: It is none for the served model.
        ModelFilesError: It is not there.
    """
    if speculative is None or not speculative.get("model"):
        return {}
    name = speculative["model"]
    draft = load_model_config(name, revision=speculative.get("revision"), skip_tokenizer_init=True)
    if draft.vocab_size != served.vocab_size:
        raise ModelConfigError(
            f"speculative_config: the draft model {name} has a vocabulary of {draft.vocab_size} tokens, and "
            f"{served.model} one of {served.vocab_size}; drafts need the same"
        )
    longest = min(served.max_model_len, draft.max_model_len, speculative.get("max_model_len") or served.max_model_len)
    return {"draft_model_path": str(draft.path), "draft_max_model_len": longest}
