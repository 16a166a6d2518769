"""Small encoders with decoders, of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from picture_model import make_tokenizer
from tokenizers import processors

from llmstack_llm import LLM

VOCAB_SIZE = 97
PROMPTS = [[(7 * i + 3) % (VOCAB_SIZE - 4) + 4 for i in range(9 * n)] + [n + 5, 2] for n in range(6)]
_T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    "relative_attention_max_distance": 20, "relative_attention_num_buckets": 8,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    "forced_bos_token_id": None, "init_std": 0.3, "activation_function": "gelu",
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5 1.1": ("T5ForConditionalGeneration", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),
    "bart, scaled": ("BartForConditionalGeneration", _BART | {"scale_embedding": True}),
    "mbart": ("MBartForConditionalGeneration", _BART | {"scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", _BART | {"pad_token_id": 0, "decoder_start_token_id": 0}),
    "m2m 100": ("M2M100ForConditionalGeneration", _BART | {"scale_embedding": True}),
    "marian": ("MarianMTModel", _BART | {"pad_token_id": 96, "decoder_start_token_id": 96, "scale_embedding": True}),
    "blenderbot": ("BlenderbotForConditionalGeneration", _BART),
    "plbart": ("PLBartForConditionalGeneration", _BART),
}
QUICK = ("t5", "m2m 100")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def write_checkpoint(folder: Path, case: str, **changes: Any) -> Any:
    name, values = CASES[case]
    model_class = getattr(transformers, name)
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**values | changes)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if not parameter_name.endswith("embed_positions.weight") or "Bart" in name:
                is_gain = parameter.ndim == 1 and parameter_name.endswith("weight")
                torch.nn.init.normal_(parameter, mean=float(is_gain), std=0.1 if parameter.ndim == 1 else 0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return model


def open_engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=48, **options)


def write_translator(folder: Path) -> tuple[Any, Any]:
    """A checkpoint with a tokenizer that ends each prompt, and a chat template; the model, and the tokenizer."""
    tokenizer = make_tokenizer(("<pad>", "<s>", "</s>", "<fr>"), {})
    backend = tokenizer.backend_tokenizer
    end = ("</s>", backend.token_to_id("</s>"))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}</s>"
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": len(tokenizer),
        "pad_token_id": backend.token_to_id("<pad>"),
        "decoder_start_token_id": end[1],
    }
    ends = {"eos_token_id": end[1], "bos_token_id": backend.token_to_id("<s>")}
    return write_checkpoint(folder, "mbart", **sizes, **ends), backend
