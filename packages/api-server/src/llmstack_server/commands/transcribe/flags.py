"""Options of `llmstack transcribe`: its own, and those of a model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from llmstack_llm.options.command_line import add_foreign_flags, add_key_flags, add_options
from llmstack_llm.options.option import Option, OptionGroup, options_of
from llmstack_llm.options.resolve import resolve
from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.commands.batch.flags import MODEL_OPTIONS, read_model
from llmstack_server.options.command_line import ALL_FOREIGN_FLAGS
from llmstack_server.options.config import ServeConfig
from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import LogLevel

_MAX_UPLOAD_MB = 4096
"""A file of this machine is no upload of a stranger."""


@option_group
class TranscribeOptions(OptionGroup):
    """Options of the files that are written, and of the server that transcribes."""

    title = "Transcripts"

    format: Literal["text", "srt", "vtt"] = option("text", help="plain text, or subtitles")
    output_dir: str | None = option(
        None, short="-o", metavar="FOLDER", help="folder for a file each (default: print them)"
    )
    language: str | None = option(
        None, metavar="CODE", help="language that is spoken, such as de (default: it is detected)"
    )
    translates: bool = option(False, flag="--translate", help="write it in English")
    prompt: str | None = option(None, metavar="TEXT", help="text that goes before, such as one that spells names")
    url: str | None = option(None, metavar="URL", help="server to ask; without it the model runs in this command")
    model_name: str | None = option(None, metavar="NAME", help="model of the server at --url (default: its first one)")
    api_key: str | None = option(
        None,
        secret=True,
        environment=("VLLM_API_KEY", "OPENAI_API_KEY"),
        metavar="KEY",
        help="API key of the server at --url; prefer LLMSTACK_API_KEY",
    )
    log_level: LogLevel = option("warning", ignores_case=True, help="log level of llmstack")


def _flag_alone(one: Option) -> Option:
    """Without its positional form: the words of this command are files."""
    return one._replace(declared=one.declared._replace(positional=""))


_MODEL_OPTIONS: Sequence[Option] = tuple(map(_flag_alone, MODEL_OPTIONS))


def add_transcribe_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every flag of `llmstack transcribe`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="sound files, or videos with sound")
    add_options(parser, [*options_of(TranscribeOptions), *_MODEL_OPTIONS])
    add_key_flags(parser, _MODEL_OPTIONS)
    add_foreign_flags(parser, ALL_FOREIGN_FLAGS)


def read_transcribe_options(
    namespace: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[list[str], TranscribeOptions, ServeConfig | None]:
    """The files, what is asked of them, and the configuration of the model; None where another server has it.

    Raises:
        BatchError: Options are at fault; the text has a line for each.
    """
    own = resolve(options_of(TranscribeOptions), namespace, environment)
    asked, problems = own.build(TranscribeOptions), own.problems
    config = read_model(namespace, environment, own, problems, _MODEL_OPTIONS, max_upload_mb=_MAX_UPLOAD_MB)
    if len(namespace.files) > 1 and own["format"] != "text" and own["output_dir"] is None:
        problems.append("--output-dir: subtitles of several files need a folder")
    if len({Path(file).stem for file in namespace.files}) < len(namespace.files) and own["output_dir"] is not None:
        problems.append("--output-dir: two files have the same name but for its end")
    if problems or asked is None:
        raise BatchError("\n".join(problems), exit_code=2)
    return namespace.files, asked, config
