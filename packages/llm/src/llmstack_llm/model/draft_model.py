"""The model that makes draft tokens, beside the served one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_llm.model.config import ModelConfig, ModelConfigError, load_model_config


def draft_model_fields(speculative: Mapping[str, Any] | None, served: ModelConfig, *, is_head: bool) -> dict[str, Any]:
    """The fields of a `ModelRunnerConfig` for what a checked `--speculative-config` names to make drafts, if anything.

    `is_head`: It reads hidden states of the served model.

    Raises:
        ModelConfigError: It is none for the served model.
        ModelFilesError: It is not there.
    """
    if speculative is None or not speculative.get("model"):
        return {}
    name = speculative["model"]
    if speculative["method"] == "mtp":
        if name != served.model:
            raise ModelConfigError(
                f"speculative_config: the method 'mtp' asks the served model, so model must be {served.model} "
                f"or left out, and is {name}"
            )
        return {}
    limit = speculative.get("max_model_len") or served.max_model_len
    if is_head:
        from llmstack_model_files import resolve_model

        return {"draft_model_path": str(resolve_model(name, speculative.get("revision"))),
                "draft_max_model_len": min(served.max_model_len, limit)}  # fmt: skip
    draft = load_model_config(name, revision=speculative.get("revision"), skip_tokenizer_init=True)
    if any(kind in draft.architecture.lower() for kind in ("eagle", "medusa", "dflash")):
        raise ModelConfigError(
            f"speculative_config: {name} is a draft head: set method to eagle, eagle3, medusa or dflash"
        )
    if draft.vocab_size != served.vocab_size:
        raise ModelConfigError(
            f"speculative_config: the draft model {name} has a vocabulary of {draft.vocab_size} tokens, and "
            f"{served.model} one of {served.vocab_size}; drafts need the same"
        )
    longest = min(served.max_model_len, draft.max_model_len, limit)
    return {"draft_model_path": str(draft.path), "draft_max_model_len": longest}
