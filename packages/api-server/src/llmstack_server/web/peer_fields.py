"""Fields of SGLang, llama.cpp's server and TGI that would change an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llmstack_server.web.unsupported import Predicate, one_of

_NEVER = one_of()
_OFF = one_of(False)
_ZERO = one_of(0, 0.0)

# The sampler has none of these. Values with which the other server changes nothing are accepted, since clients send
# them with every request.
_SAMPLING: Final[Mapping[str, Predicate]] = {
    "dry_multiplier": _ZERO,
    "dry_base": one_of(1.75),
    "dry_allowed_length": one_of(2),
    "dry_penalty_last_n": one_of(0, 64),
    "dry_sequence_breakers": one_of(["\n", ":", '"', "*"]),
    "xtc_probability": _ZERO,
    "xtc_threshold": one_of(0.1),
    "mirostat": one_of(0),
    "mirostat_tau": one_of(5, 5.0),
    "mirostat_eta": one_of(0.1),
    "dynatemp_range": _ZERO,
    "dynatemp_exponent": one_of(1, 1.0),
    "adaptive_target": one_of(-1, -1.0),
    "adaptive_decay": one_of(0.9),
    "repeat_penalty": one_of(1, 1.0),  # `repetition_penalty` is of the whole text
    "repeat_last_n": one_of(-1),
    "min_keep": _ZERO,
    "samplers": _NEVER,
    "beam_width": one_of(1),
    "do_sample": one_of(True),
    "sampling_seed": _NEVER,
    "sampling_params": one_of({}),
    "custom_logit_processor": _NEVER,
    "custom_params": one_of({}),
    "watermark": one_of(False, {}),
}

# Limits, and where a text ends.
_ENDS: Final[Mapping[str, Predicate]] = {
    "stop_regex": one_of("", []),
    "no_stop_trim": _OFF,  # `include_stop_str_in_output`
    "max_new_tokens": _NEVER,
    "min_new_tokens": one_of(0),
    "n_predict": one_of(-1),
    "n_indent": one_of(0),
    "n_cmpl": one_of(1),
    "t_max_predict_ms": one_of(0, -1),
    "truncate": _NEVER,
}

# What is computed, and with what.
_INPUTS: Final[Mapping[str, Predicate]] = {
    "adapter_id": _NEVER,
    "extra_key": _NEVER,  # separates cached prefixes, as `cache_salt` does
    "input_ids": _NEVER,
    "lora": one_of([]),
    "lora_path": _NEVER,
    "session_params": one_of({}),
    "guideline": _NEVER,
    "tool_prompt": _NEVER,
    "max_dynamic_patch": _NEVER,
    "min_dynamic_patch": _NEVER,
    "use_audio_in_video": _OFF,
    "images_config": one_of({}),
    "video_config": one_of({}),
    "bootstrap_host": _NEVER,
    "bootstrap_port": _NEVER,
    "bootstrap_room": _NEVER,
}

# Reasoning and tool calls.
_READING: Final[Mapping[str, Predicate]] = {
    "grammar_lazy": _OFF,
    "grammar_triggers": one_of([]),
    "preserved_tokens": one_of([]),
    "parse_tool_calls": one_of(True),
    "separate_reasoning": one_of(True),
    "stream_reasoning": one_of(True),
    "reasoning_format": one_of("auto", "deepseek"),
    "reasoning_control": _OFF,
    "reasoning_budget_tokens": one_of(-1),
    "reasoning_budget_start_tag": _NEVER,
    "reasoning_budget_end_tag": _NEVER,
    "reasoning_budget_end_tags": _NEVER,
    "reasoning_budget_message": one_of(""),
    "generation_prompt": _NEVER,
    "chat_format": _NEVER,
    "chat_parser": _NEVER,
}

# Parts that an answer has there.
_ANSWER: Final[Mapping[str, Predicate]] = {
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "routed_experts_start_len": one_of(0),
    "return_cached_tokens_details": _OFF,
    "return_spec_tokens_details": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_meta_info": _OFF,
    "return_input_ids_in_sglext": _OFF,
    "return_output_ids_in_sglext": _OFF,
    "return_sampling_mask": _OFF,
    "sampling_logprobs_mode": _NEVER,
    "return_flat_raw_output_top_logprobs": _OFF,
    "n_probs": one_of(0),
    "post_sampling_probs": _OFF,
    "return_tokens": _OFF,
    "response_fields": one_of([]),
    "details": _OFF,
    "decoder_input_details": _OFF,
    "return_full_text": _OFF,
    "top_n_tokens": one_of(0),
}

PEERS: Final[Mapping[str, Predicate]] = {**_SAMPLING, **_ENDS, **_INPUTS, **_READING, **_ANSWER}
"""Fields of generating requests."""

PEERS_OF_CHATS: Final[Mapping[str, Predicate]] = {
    "thinking": one_of({}),  # of Messages it is a field of its own
    "task": _NEVER,
}
"""Fields of chats alone."""

PEERS_OF_INPUTS: Final[Mapping[str, Predicate]] = {
    "lora_path": _NEVER,
    "embed_override_token_id": _NEVER,
    "embed_overrides": one_of([]),
    "embd_normalize": one_of(2),
}
"""Fields of embeddings and classifications."""

PEERS_OF_SCORES: Final[Mapping[str, Predicate]] = {
    "query": _NEVER,
    "label_token_ids": _NEVER,
    "apply_softmax": _OFF,
    "item_first": _OFF,
    "temperature": one_of(1, 1.0),
    "return_token_logprobs": _OFF,
    "return_pooled_hidden_states": _OFF,
    "score_extraction_token": _NEVER,
    "embed_override_token_id": _NEVER,
    "query_embed_overrides": one_of([]),
    "item_embed_overrides": one_of([]),
}
"""Fields of scores."""

PEERS_OF_RANKINGS: Final[Mapping[str, Predicate]] = {"instruct": _NEVER}
"""Fields of rankings."""

PEERS_OF_TOKENIZE: Final[Mapping[str, Predicate]] = {
    "content": _NEVER,
    "add_special": _NEVER,
    "parse_special": one_of(True),
    "with_pieces": _OFF,
    "tool_choice": one_of("auto"),
    "reasoning_effort": _NEVER,
}
"""Fields of `/tokenize`."""
