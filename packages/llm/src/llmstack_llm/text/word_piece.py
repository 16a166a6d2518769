"""BERT's tokenizer from a list of word pieces."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llmstack_types.json_values import JSONValue

_CLASSES = ("BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "DistilBertTokenizerFast")
_DEFAULTS: Mapping[str, str] = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def is_word_piece(config: Mapping[str, object]) -> bool:
    """Whether a folder's `tokenizer_config.json` names this kind, or none; others use the same file name otherwise."""
    return config.get("tokenizer_class", _CLASSES[0]) in _CLASSES


def word_piece_tokenizer(pieces: str, config: Mapping[str, JSONValue]) -> Tokenizer:
    """The tokenizer of a `vocab.txt`, one piece per line.

    Raises:
        ValueError: A token that begins or ends every text is not in the list.
    """
    # Not `splitlines`: a piece may be one of Unicode's other ends of lines.
    lines = pieces.removesuffix("\n").split("\n")
    vocab = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    names = {name: content_of(config.get(name)) or default for name, default in _DEFAULTS.items()}
    cls, sep, unk = names["cls_token"], names["sep_token"], names["unk_token"]
    missing = [token for token in (cls, sep, unk) if token not in vocab]
    if missing:
        raise ValueError(f"vocab.txt lacks {', '.join(missing)}")
    backend = Tokenizer(models.WordPiece(vocab, unk_token=unk))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
    )
    found = [AddedToken(token, normalized=False, special=True) for token in names.values() if token in vocab]
    backend.add_special_tokens(found)
    return backend


def content_of(token: object) -> str | None:
    """A token's text: configurations write it as a string or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
