"""Conversion of tiktoken's files and of Mistral's tekken."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

from llmstack_llm.model.tokenizer_files.added import named_token
from llmstack_llm.model.tokenizer_files.parts import assembled, byte_level_parts
from llmstack_llm.model.tokenizer_files.source import MAX_TOKEN_BYTES, MAX_TOKENS, ConversionError
from llmstack_model_files import ModelFilesError, parse_json_object
from llmstack_types.json_values import JSONObject, JSONValue

_MAX_PATTERN_CHARS = 4096
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(3, 248)),
)  # fmt: skip
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
_NUM_KIMI_TOKENS = 256
_LLAMA_TYPES = ("", "llama", "mllama", "mllama_text_model")
_TEKKEN_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def check_family(name: str, model_type: str) -> None:
    """Refuses a `tokenizer.model` of another family: those of Llama 4 and GLM-4 have the format of Llama 3's."""
    if name == "tokenizer.model" and model_type not in _LLAMA_TYPES:
        raise ConversionError(
            f"{name} is a tiktoken file, which does not say how it cuts texts, and the model is no Llama 3 but of the "
            f"type {model_type!r}; convert it to a tokenizer.json first"
        )


def check_size(name: str, tokenizer: Mapping[str, JSONValue], vocab_size: int | None) -> None:
    """Refuses special tokens that the model has no logits for: the file is of another model than its name says."""
    num_tokens = len(tokenizer["model"]["vocab"])
    if vocab_size is not None and num_tokens > vocab_size:
        raise ConversionError(
            f"{name} has {num_tokens} tokens with the special ones of its family, and the model has {vocab_size}; "
            "convert it to a tokenizer.json first"
        )


def convert_tiktoken(
    content: bytes, name: str, config: Mapping[str, object], added: Mapping[int, str], added_special: frozenset[int]
) -> tuple[JSONObject, JSONObject]:
    """`tokenizer.json`, and the named tokens. The file has no expression and no special tokens: its name tells them."""
    ranked = _ranked(content, name)
    named: JSONObject
    if name == "qwen.tiktoken":
        pattern, default, named = _QWEN, _QWEN_TOKENS, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    elif name == "tokenizer.model":
        pattern, default = _LLAMA_3, _LLAMA_3_TOKENS
        named = {"bos_token": _LLAMA_3_TOKENS[0], "eos_token": _LLAMA_3_TOKENS[1]}
    elif name == "tiktoken.model":
        pattern, default, named = _KIMI, (), {}
    else:
        raise ConversionError(f"{name} does not say how it cuts texts; convert it to a tokenizer.json first")
    if not added:
        added = dict(enumerate(default, start=len(ranked)))
        added_special = frozenset(added)
    elif name == "tiktoken.model":
        reserved = range(len(ranked), len(ranked) + _NUM_KIMI_TOKENS)
        unnamed = {token_id: f"<|reserved_token_{token_id}|>" for token_id in reserved if token_id not in added}
        added, added_special = {**added, **unnamed}, added_special | unnamed.keys()
    if not added or min(added) < len(ranked):
        raise ConversionError(f"the special tokens of {name} are missing, or have ids of its other tokens")
    first = named_token({**named, **config}, "bos_token")
    if config.get("add_bos_token", name == "tokenizer.model") is not True:
        first = None
    parts = byte_level_parts(ranked, 0, pattern, composes=name == "qwen.tiktoken")
    parts["model"]["vocab"] |= {text: token_id for token_id, text in added.items()}
    return assembled(parts, added, added_special, first, None), named


def convert_tekken(content: bytes) -> tuple[JSONObject, JSONObject]:
    """`tokenizer.json` of a `tekken.json`, and the named tokens."""
    try:
        found = parse_json_object(content, "tekken.json")
    except ModelFilesError as error:
        raise ConversionError(str(error).removesuffix(".")) from error
    config, vocab = found.get("config"), found.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocab, list):
        raise ConversionError("tekken.json has no config or no vocab")
    pattern, size, num_special = (
        config.get(key) for key in ("pattern", "default_vocab_size", "default_num_special_tokens")
    )
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _MAX_PATTERN_CHARS:
        raise ConversionError("tekken.json has no pattern, or one that is too long")
    if type(size) is not int or type(num_special) is not int or not 0 < num_special < size <= MAX_TOKENS:
        raise ConversionError("tekken.json has sizes that a vocabulary cannot have")
    if len(vocab) < size - num_special:
        raise ConversionError("tekken.json has fewer tokens than it says")
    special, is_control = _special_tokens(found.get("special_tokens"), num_special)
    ranked = [
        _decoded(_entry_bytes(entry, rank), "tekken.json") for rank, entry in enumerate(vocab[: size - num_special])
    ]
    _check_bytes(ranked, "tekken.json")
    parts = byte_level_parts(ranked, num_special, pattern)
    parts["model"]["vocab"] |= {text: token_id for token_id, text in special.items()}
    known = set(special.values())
    pairs = (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>"))
    named = {key: text for key, text in pairs if text in known}
    return assembled(parts, special, is_control, named.get("bos_token"), None), named


def _special_tokens(listed: object, num_special: int) -> tuple[dict[int, str], frozenset[int]]:
    """Id to text; those that the file does not list have the names that Mistral gives them."""
    entries: object = [{"rank": rank, "token_str": text} for rank, text in enumerate(_TEKKEN_TOKENS)]
    entries = entries if listed is None else listed
    found = {rank: f"<SPECIAL_{rank}>" for rank in range(num_special)}
    control = set(found)
    for entry in entries if isinstance(entries, list) else [None]:
        fields = entry if isinstance(entry, dict) else {}
        rank, text = fields.get("rank"), fields.get("token_str")
        if not isinstance(rank, int) or not 0 <= rank < num_special or not _is_text(text):
            raise ConversionError("tekken.json has a special token without a text or a rank that it may have")
        found[rank] = str(text)
        if fields.get("is_control") is False:
            control.discard(rank)
    if len(set(found.values())) != num_special:
        raise ConversionError("two special tokens of tekken.json are the same")
    return found, frozenset(control)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TOKEN_BYTES


def _entry_bytes(entry: object, rank: int) -> bytes:
    text = entry.get("token_bytes") if isinstance(entry, dict) and entry.get("rank") == rank else None
    if not isinstance(text, str):
        raise ConversionError(f"the token {rank} of tekken.json is missing or out of order")
    return text.encode()


def _ranked(content: bytes, name: str) -> list[bytes]:
    """The tokens of a file of lines, each of base64 and a rank."""
    lines = content.splitlines()
    if len(lines) > MAX_TOKENS:
        raise ConversionError(f"{name} has more than {MAX_TOKENS} tokens")
    ranked: list[bytes] = []
    for line in filter(None, lines):
        encoded, _, rank = line.partition(b" ")
        if rank.strip() != str(len(ranked)).encode():
            raise ConversionError(f"{name} is damaged: line {len(ranked) + 1} is no token of rank {len(ranked)}")
        ranked.append(_decoded(encoded, name))
    _check_bytes(ranked, name)
    return ranked


def _decoded(encoded: bytes, name: str) -> bytes:
    try:
        token = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ConversionError(f"{name} is damaged: a token is not base64") from error
    if not 0 < len(token) <= MAX_TOKEN_BYTES:
        raise ConversionError(f"{name} has a token that is empty or has more than {MAX_TOKEN_BYTES} bytes")
    return token


def _check_bytes(ranked: Sequence[bytes], name: str) -> None:
    if len({token for token in ranked if len(token) == 1}) != 256:
        raise ConversionError(f"{name} lacks tokens of single bytes, so some texts would have no tokens")
