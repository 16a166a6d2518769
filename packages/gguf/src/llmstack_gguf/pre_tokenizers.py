"""Rules by which byte-level tokenizers cut a text before merges apply.

They are those of llama.cpp for each name of `tokenizer.ggml.pre`, and of the `tokenizer.json` of the models themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDINGS}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDINGS}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace(_ENDINGS, "").replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN_35 = _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_SEED_CODER = _QWEN_2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Cased letters, as far as the `tokenizer.json` of DeepSeek LLM lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As of GPT-4o, but runs of Han characters are pieces of their own.
_UPPER, _LOWER = (rf"[\p{{{cases}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"Lu}\p{Lt", "Ll"))
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_GPT_2 = {**_BYTES, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _in_turn(*steps: Mapping[str, Any] | str) -> dict[str, Any]:
    """Steps that each cut the pieces of the one before; a text is an expression whose matches are pieces."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    made = [{**split, "pattern": {"Regex": step}} if isinstance(step, str) else step for step in steps]
    return {"type": "Sequence", "pretokenizers": made}


_LLAMAS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_SMOLLM = _in_turn(_DIGITS, _GPT_2)
PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "default", "mpt", "olmo", "a.x-4.0", "mellum", "trillion", "gigachat", "jais", "exaone4"),
        _GPT_2,
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _in_turn(_BLOOM, _BYTES)),
    **dict.fromkeys((*_LLAMAS, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _in_turn(_LLAMA_3, _BYTES)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        _in_turn(_QWEN_2, _BYTES),
    ),
    "qwen35": _in_turn(_QWEN_35, _BYTES),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b", "command-r", "codeshell", "exaone"), _SMOLLM),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _in_turn(_O200K, _BYTES)),
    "kimi-k2": _in_turn(_KIMI, _BYTES),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _in_turn(_BAILING, _BYTES)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        _in_turn(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_3, _BYTES),
    ),
    "seed-coder": _in_turn(_SEED_CODER, _BYTES),
    "tekken": _in_turn(_TEKKEN, _BYTES),
    "viking": _in_turn(_BLOOM, _DIGITS, _BYTES),
    "deepseek-coder": _in_turn(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _DIGITS, _BYTES),
    "deepseek-llm": _in_turn(
        r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_MARKS}]+", r"\s+$", _DEEPSEEK_HAN, _DIGITS, _BYTES
    ),
    "falcon": _in_turn(
        {"type": "Punctuation", "behavior": "Contiguous"},
        _GPT_2,
        {"type": "Digits", "individual_digits": False},
        "[0-9][0-9][0-9]",
    ),
}
"""`tokenizer.ggml.pre` to the cutting of a text before merges apply."""
IGNORES_MERGES = (*_LLAMAS, "tekken")
"""A whole word that is a token is that token; texts begin with the token for that, unless the file says otherwise."""
COMPOSES = ("qwen2", "qwen35", "deepseek-r1-qwen", "mpt", "olmo")
"""Texts are in normalization form C."""
