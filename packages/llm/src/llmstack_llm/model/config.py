"""Configuration of a model from its folder, as far as text and requests need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack_llm.model.beam_defaults import BeamDefaults, beam_defaults
from llmstack_llm.model.generation_config import chosen_file, read_generation_config, sampling_defaults
from llmstack_llm.model.pooling_config import PoolingConfig, load_pooling_config, override_pooling_config
from llmstack_llm.model.special_ids import special_ids
from llmstack_llm.model.tokenizer_files import converted_folder
from llmstack_llm.model.use import ModelUse
from llmstack_types import LLMStackError, PoolingType, SamplingParams
from llmstack_types.json_values import JSONValue

if TYPE_CHECKING:
    from llmstack_model_files import FileForm

_NOTHING: Mapping[str, Any] = {}
# Where each architecture writes its number of positions; the first key that is there counts.
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length",
                  "max_target_positions")  # fmt: skip
_POSITIONS_BEHIND_PADDING = (
    "camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
_TWO_TOKEN_TYPES = ("albert", "bert", "electra", "nomic_bert")  # where config.json says nothing
_DEFAULT_MAX_MODEL_LEN = 2048
_POSITIONS_OF_PAIRS = 512  # of an encoder with a decoder whose positions have no end, as of T5


class ModelConfigError(LLMStackError, ValueError):
    """The folder or an option cannot be used; the text names both in one sentence."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts about the served model.

    Attributes:
        model: As the user named it.
        path: Its folder.
        tokenizer_path: The folder of its tokenizer; None for none.
        max_position_embeddings: The positions that the checkpoint was made for; None where it does not say.
        max_model_len: Prompt and output together, in tokens.
        vocab_size: Width of the logits.
        dtype: As asked for; `auto` is the checkpoint's.
        default_sampling: Field of `SamplingParams` to the default, the model's own or one given in its place.
        beam_defaults: Of beam searches, beside these.
        hf_config: All of `config.json`.
        pooling: The pooling that a folder of sentence-transformers declares, or a `pooler_config` in its place.
        use: The abilities of the model that are offered.
        max_logprobs: Most likely tokens that may be asked for at each place.
    """

    model: str
    path: Path
    architecture: str
    model_type: str
    max_model_len: int
    vocab_size: int
    tokenizer_path: Path | None = None
    max_position_embeddings: int | None = None
    dtype: str = "auto"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    beam_defaults: BeamDefaults = field(default_factory=BeamDefaults)
    hf_config: Mapping[str, JSONValue] = field(default_factory=dict, repr=False)
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    use: ModelUse = field(default_factory=ModelUse)
    max_logprobs: int = 20

    @property
    def num_token_types(self) -> int:
        """2 for a model that distinguishes the two texts of a pair."""
        found = self.hf_config.get("type_vocab_size", 2 if self.model_type in _TWO_TOKEN_TYPES else 1)
        return found if type(found) is int else 1

    @property
    def labels_tokens(self) -> bool:
        """Whether a classifier labels each token, not the prompt."""
        return self.architecture.endswith("ForTokenClassification")

    @property
    def gives_token_vectors(self) -> bool:
        """Whether the model was trained for a vector of each token, which are compared by late interaction."""
        from llmstack_model_files import COLBERT

        return self.architecture == COLBERT or self.pooling.of_tokens

    @property
    def matryoshka_dimensions(self) -> tuple[int, ...]:
        """The sizes to which vectors may be cut, where `config.json` lists them."""
        found = self.hf_config.get("matryoshka_dimensions")
        return tuple(size for size in found if type(size) is int) if isinstance(found, list) else ()

    @property
    def label_pooling(self) -> PoolingType | None:
        """The pooling of a classifier's head, where its configuration says so."""
        return PoolingType.MEAN if self.hf_config.get("classifier_pooling") == "mean" else None

    @property
    def label_names(self) -> Mapping[int, str]:
        """Names of a classifier's labels, as far as it has any."""
        named = self.hf_config.get("id2label")
        items = named.items() if isinstance(named, Mapping) else ()
        return {int(key): str(name) for key, name in items if str(key).isdecimal()}

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults under the model's own; `max_tokens` None unless the model sets one."""
        return SamplingParams(**({"max_tokens": None} | dict(self.default_sampling)))


def load_model_config(
    model: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    generation_config: str = "auto",
    override_generation_config: Mapping[str, object] = _NOTHING,
    hf_overrides: Mapping[str, object] = _NOTHING,
    max_logprobs: int = 20,
    tokenizer_revision: str | None = None,
    skip_tokenizer_init: bool = False,
    use: ModelUse | None = None,
    pooler_config: Mapping[str, object] | None = None,
    mmproj: str | None = None,
    file_form: FileForm | None = None,
) -> ModelConfig:
    """Resolves the folders and reads their configurations.

    `generation_config`, `override_generation_config`: See `sampling_defaults`.
    `hf_overrides`: Values in place of those in `config.json`; objects are merged.
    `max_logprobs`: -1 allows the whole vocabulary.
    `mmproj`, `file_form`: See `resolve_model`.

    Raises:
        ModelConfigError, GenerationConfigError: A needed fact is missing, or an option contradicts the model.
        ConversionError: The tokenizer is in a format that cannot be converted.
        ModelFilesError: A folder or file is missing or unreadable.
    """
    from llmstack_model_files import ANY_FORM, read_model_config, resolve_model

    form = file_form or ANY_FORM
    path = resolve_model(model, revision, mmproj, form)
    other = None if tokenizer == model else tokenizer
    tokenizer_path = None
    if not skip_tokenizer_init:
        tokenizer_path = converted_folder(_tokenizer_folder(other, tokenizer_revision, path), form.tokenizer)
    config = read_model_config(path, hf_overrides)
    architecture, text_config = _architecture(config), _text_config(config)
    generation, vocab_size = read_generation_config(path), _vocab_size(text_config)
    num_positions = _num_positions(text_config)
    # As in transformers, what counts for beams is in the first file, unless there is none.
    of_beams = chosen_file(generation or text_config, generation_config)
    pooling = override_pooling_config(load_pooling_config(path), pooler_config or {})
    return ModelConfig(
        model=model,
        path=path,
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        max_model_len=_max_model_len(max_model_len, num_positions, pooling.max_seq_length),
        vocab_size=vocab_size,
        tokenizer_path=tokenizer_path,
        max_position_embeddings=num_positions,
        dtype=dtype,
        eos_token_ids=special_ids("eos_token_id", generation, text_config, tokenizer_path),
        bos_token_id=next(iter(special_ids("bos_token_id", generation, text_config, tokenizer_path)), None),
        default_sampling=sampling_defaults(generation, generation_config, override_generation_config),
        beam_defaults=beam_defaults(of_beams, is_speech=config.get("model_type") == "whisper"),
        hf_config=config,
        pooling=pooling,
        use=use or ModelUse(),
        max_logprobs=vocab_size if max_logprobs == -1 else max_logprobs,
    )


def _tokenizer_folder(tokenizer: str | None, revision: str | None, model_path: Path) -> Path:
    """The model's folder, or one that is named; a tokenizer's needs no config.json."""
    from llmstack_model_files import resolve_model

    folder = model_path if tokenizer is None else Path(tokenizer).expanduser()
    return folder if tokenizer is None or folder.is_dir() else resolve_model(tokenizer, revision)


def _architecture(config: Mapping[str, object]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelConfigError("config.json: 'architectures' must name the model's class")
    return architectures[0]


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    found = config.get("text_config") or config
    if not isinstance(found, Mapping):
        raise ModelConfigError("config.json: 'text_config' must be an object")
    return found


def _vocab_size(config: Mapping[str, object]) -> int:
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ModelConfigError("config.json: 'vocab_size' must be a positive integer")
    return vocab_size


def _num_positions(config: Mapping[str, JSONValue]) -> int | None:
    from llmstack_model_files import extended_positions

    for key in _POSITION_KEYS:
        if type(config.get(key)) is int and config[key] > 0:
            return extended_positions(config, int(config[key])) - _num_reserved_positions(config)
    return _POSITIONS_OF_PAIRS if config.get("is_encoder_decoder") is True else None


def _num_reserved_positions(config: Mapping[str, object]) -> int:
    """Positions that no token takes: RoBERTa's begin behind that of the padding."""
    pad_token_id = config.get("pad_token_id")
    if config.get("model_type") not in _POSITIONS_BEHIND_PADDING:
        return 0
    return (pad_token_id if type(pad_token_id) is int else 1) + 1


def _max_model_len(asked: int | None, num_positions: int | None, max_seq_length: int | None) -> int:
    if asked is None:
        default = num_positions or _DEFAULT_MAX_MODEL_LEN
        return default if max_seq_length is None else min(default, max_seq_length)
    if asked < 1:
        raise ModelConfigError(f"max_model_len {asked}: must be at least 1")
    if num_positions is not None and asked > num_positions:
        raise ModelConfigError(f"max_model_len {asked}: the model has positions for {num_positions} tokens only")
    return asked
