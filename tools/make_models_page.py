"""Writes the tables in docs/models.md; with --check, says whether they are current."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from generated_page import DOCS, write_page

from llmstack_model_files import SPEECH_ARCHITECTURE
from llmstack_model_runner.architectures import (
    ARCHITECTURES,
    BACKEND_ENCODER,
    BACKEND_TOWERS,
    ENCODERS,
    PICTURE_ENCODERS,
    POOLING_DECODERS,
    SOUND_ENCODERS,
)
from llmstack_model_runner.models import CausalLM, load_model_class
from llmstack_model_runner.preflight import adapted_layers_of, readable_formats
from llmstack_types.vocabulary import RoundingScheme, words_of

PAGE = "models.md"
BEGIN = "<!-- model code: begin -->\n"
END = "<!-- model code: end -->\n"
COLUMNS = (
    "| model code | architectures | quantized checkpoints | rounding while loading | LoRA | several ranks "
    "| parity test |\n"
    "|---|---|---|---|---|---|---|\n"
)
PICTURES_BEGIN = "<!-- pictures: begin -->\n"
PICTURES_END = "<!-- pictures: end -->\n"
PICTURES_COLUMNS = "| class in `config.json` | pictures |\n|---|---|\n"
SOUNDS_BEGIN = "<!-- sounds: begin -->\n"
SOUNDS_END = "<!-- sounds: end -->\n"
SOUNDS_COLUMNS = "| class in `config.json` | sound |\n|---|---|\n"
SOURCES = "../packages/model-runner/src"
TESTS = "../packages/model-runner/tests/models/test_"
_Key = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], str]


def table() -> str:
    """Rows for each file of model code, and one for the code of transformers."""
    pooling = {name: ARCHITECTURES[decoder] for name, (decoder, _) in POOLING_DECODERS.items()}
    rows = [_row(*item) for item in sorted(_by_module({**ARCHITECTURES, **ENCODERS, **pooling}).items())]
    rounding = _words(words_of(RoundingScheme))
    return COLUMNS + "".join(rows) + _transformers_row(rounding)


def encoder_rows(encoders: Mapping[str, str]) -> str:
    """Rows of the classes with these encoders, by the file of their encoder."""
    rows: dict[str, list[str]] = {}
    for architecture, target in encoders.items():
        rows.setdefault(target.partition(":")[0], []).append(architecture)
    return "".join(f"| {_words(names)} | {_source(module)} |\n" for module, names in rows.items())


def picture_table() -> str:
    """Rows of the classes that take pictures."""
    others = [
        f"| `{architecture}` with {_words(towers)} | transformers: {_source(BACKEND_ENCODER.partition(':')[0])} |\n"
        for architecture, towers in BACKEND_TOWERS.items()
    ]
    return PICTURES_COLUMNS + encoder_rows(PICTURE_ENCODERS) + "".join(others)


def _by_module(targets: Mapping[str, str]) -> dict[_Key, list[str]]:
    """Architectures by the file of their code, and by what they can do."""
    rows: dict[_Key, list[str]] = {}
    for architecture, target in targets.items():
        module, adapted = target.partition(":")[0], adapted_layers_of(architecture)
        key = (module, readable_formats(architecture), adapted, _ranks(architecture), _parity_test(architecture))
        rows.setdefault(key, []).append(architecture)
    return rows


def _row(key: _Key, architectures: list[str]) -> str:
    module, formats, layers, ranks, test = key
    rounding = _words(words_of(RoundingScheme))
    return (
        f"| {_source(module)} | {_words(sorted(architectures))} | {_words(formats)} | {rounding} "
        f"| {', '.join(layers) or 'no'} | {_words(ranks) if ranks else 'no'} | {test} |\n"
    )


def _source(module: str) -> str:
    """A link to the file of a module."""
    path = module.replace(".", "/") + ".py"
    return f"[{path.rpartition('/')[2]}]({SOURCES}/{path})"


def _ranks(architecture: str) -> tuple[str, ...]:
    """The flags for several ranks that the model's class allows on a CPU."""
    model_class = load_model_class(architecture)
    if not model_class.can_be_sharded:
        return ()
    return ("-tp", "-pp") if issubclass(model_class, CausalLM) else ("-tp",)


def _parity_test(architecture: str) -> str:
    """A link to the file that compares the architecture with transformers."""
    if architecture == SPEECH_ARCHITECTURE:
        return _link("../integration-tests/test_speech.py")
    if architecture in ARCHITECTURES:
        return _link(f"{TESTS}parity.py")
    has_labels = architecture.endswith("ForSequenceClassification")
    return _link(f"{TESTS}classification.py" if has_labels else "../packages/model-runner/tests/steps/test_pooling.py")


def _link(path: str) -> str:
    return f"[{path.rpartition('/')[2]}]({path})"


def _transformers_row(rounding: str) -> str:
    formats, test = _words(readable_formats("")), _link(f"{TESTS}transformers_backend.py")
    return f"| transformers | all others | {formats} | {rounding} | attention, feed-forward | no | {test} |\n"


def _words(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "none"


def page() -> str:
    """The page with the tables between their marks replaced."""
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    sounds = SOUNDS_COLUMNS + encoder_rows(SOUND_ENCODERS)
    parts = ((BEGIN, table(), END), (PICTURES_BEGIN, picture_table(), PICTURES_END), (SOUNDS_BEGIN, sounds, SOUNDS_END))
    for begin, content, end in parts:
        before, mark, rest = text.partition(begin)
        _, end_mark, after = rest.partition(end)
        if not mark or not end_mark:
            raise ValueError(f"{PAGE} has no marks for a table")
        text = f"{before}{begin}{content}{end}{after}"
    return text


if __name__ == "__main__":
    sys.exit(write_page(PAGE, page()))
