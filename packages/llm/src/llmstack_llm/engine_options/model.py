"""Options of the model, its files, its tokenizer and its use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from llmstack_llm.options.option import OptionGroup, positional_group
from llmstack_llm.options.problem import Problem
from llmstack_llm.options.value_type import ValueType
from llmstack_llm.text.prompt_formats import PROMPT_FORMATS, format_name
from llmstack_types.engine_settings import UseSettings, WeightSettings
from llmstack_types.options import REQUIRED, option, option_group
from llmstack_types.vocabulary import ConfigFormat, ContentFormat, TokenizerMode

if TYPE_CHECKING:
    from llmstack_model_files import FileForm


def check_chat_template(text: str) -> str:
    """A path to a file, a template itself, which has braces, or a name, which is looked up with the model."""
    is_name = text.replace("-", "_").isidentifier() or format_name(text) is not None
    if "{" not in text and "\n" not in text and not is_name and not os.path.isfile(text):
        raise ValueError(f"there is no file {text[:200]!r}, and a template has braces")
    return text


@positional_group
class ModelName(OptionGroup):
    """The one option that is a positional argument as well."""

    title = "Model"

    model: str = option(
        REQUIRED,
        positional="model",
        help="local folder, GGUF file, registered name such as smollm2, or Hugging Face repository id; without one, "
        "smollm2 is served if it is installed, else the embedded demo model",
    )


@option_group
class ModelOptions(WeightSettings, OptionGroup):
    """The model, and its precision."""

    title = "Model"

    tokenizer_mode: TokenizerMode = option(
        "auto",
        aliases={"hf": "auto"},
        help="how prompts are made: 'auto' is by the repository's tokenizer and chat template; 'mistral' is by "
        "tekken.json, as mistral-common does; the others are the formats of families that publish code in place of a "
        "template",
    )
    config_format: ConfigFormat = option(
        "auto", aliases={"hf": "auto"}, help="'mistral' reads params.json, in place of config.json"
    )
    pack_cache: bool = option(
        True,
        help="keep the packed weights of a CPU in $XDG_CACHE_HOME/llmstack/packed, at most 32 GiB, for later starts",
    )
    mmproj: str | None = option(
        None,
        metavar="FILE",
        help="GGUF file with the encoder of pictures for a text model in another one, as llama.cpp writes it",
    )
    max_model_len: int | None = option(
        None,
        at_least=1,
        suffixes=True,
        aliases={-1: None, "-1": None, "auto": None},
        help="longest request in tokens, such as 4096, 4k or 4K; -1 or auto for the model's maximum (default: -1)",
    )
    chat_template: str | None = option(
        None,
        check=check_chat_template,
        metavar="FILE",
        help="Jinja file, the template itself, or the name of one of the model's or of llmstack's (default: the "
        "model's)",
    )
    chat_template_content_format: ContentFormat = option(
        "auto",
        help="pass message content to the template as one string or as OpenAI's list of parts; 'auto' detects it",
    )
    generation_config: str = option(
        "auto",
        metavar="SOURCE",
        help="source of sampling defaults: 'auto' is the model's generation_config.json, 'vllm' is none, or a folder",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None, help="sampling defaults that replace those of --generation-config", example='{"temperature": 0.2}'
    )

    @property
    def prompt_template(self) -> str | None:
        """The chat template in place of the model's, or its name; None for the model's."""
        return self.tokenizer_mode if self.tokenizer_mode in PROMPT_FORMATS else self.chat_template

    @property
    def file_form(self) -> FileForm:
        """Which files are read of a model that is there in two forms."""
        from llmstack_model_files import FileForm

        asked = (self.config_format, self.load_format, self.tokenizer_mode)
        return FileForm(*("mistral" if word == "mistral" else "auto" for word in asked))

    def conflicts(self) -> Iterator[Problem]:
        """Adds a template that would not be used."""
        yield from super().conflicts()
        if self.chat_template is not None and self.prompt_template != self.chat_template:
            yield Problem("{tokenizer_mode} and {chat_template} contradict each other; give one of them")


@option_group
class RepositoryOptions(OptionGroup):
    """Places of the model and its tokenizer."""

    title = "Repository and tokenizer"

    tokenizer: str | None = option(None, help="folder or repository id of the tokenizer (default: the model's)")
    tokenizer_revision: str | None = option(None, metavar="REVISION", help="branch, tag or commit of --tokenizer")
    skip_tokenizer_init: bool = option(
        False, replaces={"--tokens-only": ("false", "0")}, help="load no tokenizer: prompts and outputs are token ids"
    )
    revision: str | None = option(None, help="branch, tag or commit of the model's repository")
    trust_remote_code: bool = option(
        False,
        help="accepted where the repository has no code, or llmstack has the model itself; code from a repository "
        "never runs",
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        key_flags={"--rope-scaling": "rope_scaling", "--rope-theta": "rope_theta"},
        help="values that replace those in config.json; objects are merged",
        example='{"max_position_embeddings": 4096}',
    )

    def conflicts(self) -> Iterator[Problem]:
        """Adds a tokenizer that would not be loaded."""
        yield from super().conflicts()
        if self.skip_tokenizer_init and self.tokenizer is not None:
            yield Problem("{skip_tokenizer_init} and {tokenizer} contradict each other; give one of them")


def read_media_limits(text: str) -> object:
    """A JSON object, or vLLM's older form such as `image=5,video=0`."""
    older = dict(part.partition("=")[::2] for part in text.split(",")) if "{" not in text else {}
    if older and all(count.strip().isdecimal() for count in older.values()):
        return {kind.strip(): int(count) for kind, count in older.items()}
    return ValueType(dict).read(text)


@option_group
class UseOptions(UseSettings, OptionGroup):
    """Which of the model's abilities are offered."""

    title = "Use of the model"

    runner: str = option(
        "auto",
        metavar="NAME",
        replaces={"--runner-type": ()},
        help="'generate' or 'pooling' offers only that, 'auto' offers both; any other value names a model runner, "
        "by entry point or as module:Class",
    )
    task: Literal["auto", "generate", "embed", "classify", "score"] = option(
        "auto",
        aliases={"embedding": "embed"},
        help="older form of --runner; 'classify' and 'score' require a model with labels",
    )
    convert: Literal["auto", "none", "embed", "classify"] = option(
        "auto", help="'none' offers no pooling with a model that generates text"
    )
    pooler_config: Mapping[str, Any] | None = option(
        None,
        also=("--override-pooler-config",),
        help="default pooling, in place of the model's",
        example='{"pooling_type": "MEAN", "normalize": true}',
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None,
        read=read_media_limits,
        help="maximum items of each kind in one prompt; zeros alone are --language-model-only (default: 64 of each)",
        example='{"image": 4, "video": 1}',
    )

    @property
    def max_media_items(self) -> Mapping[str, int]:
        """Items of each kind in one prompt at most, where they are limited."""
        limits = (self.limit_mm_per_prompt or {}).items()
        counts = {kind: limit.get("count") if isinstance(limit, Mapping) else limit for kind, limit in limits}
        return {kind: count for kind, count in counts.items() if count is not None}

    @property
    def is_text_only(self) -> bool:
        """Whether a model with parts for images or sound is asked for its text alone."""
        counts = self.max_media_items.values()
        return self.language_model_only or (bool(counts) and not any(counts))

    def conflicts(self) -> Iterator[Problem]:
        """Adds a runner and a task that exclude each other."""
        yield from super().conflicts()
        if self.task == "auto":
            return
        from llmstack_llm.model.use import ModelUse  # late: most lines need none

        try:
            ModelUse.from_options(self.runner, self.task, self.convert)
        except ValueError:
            yield Problem(
                "{runner} {runner_value} and {task} {task_value} contradict each other; give one of them",
                runner_value=self.runner, task_value=self.task,
            )  # fmt: skip
