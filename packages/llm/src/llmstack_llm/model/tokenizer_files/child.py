"""The child process of a conversion: `python -m …child FOLDER OUTPUT FORMAT NAME`."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from llmstack_llm.model.tokenizer_files.added import configured_tokens
from llmstack_llm.model.tokenizer_files.sentencepiece import convert_sentencepiece
from llmstack_llm.model.tokenizer_files.source import (
    ConversionError,
    Format,
    has_template,
    read_configuration,
    read_model,
    read_source,
)
from llmstack_llm.model.tokenizer_files.tekken_template import tekken_template
from llmstack_llm.model.tokenizer_files.tiktoken import check_family, check_size, convert_tekken, convert_tiktoken
from llmstack_model_files import ModelFilesError

EXIT_REFUSED = 3
_MAX_MEMORY_BYTES = 8 << 30
_MAX_SECONDS = 120


def convert(folder: Path, output: Path, file_format: Format, name: str) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, and a chat template where Mistral's tokenizer is alone.

    `output`: Has the files beside the tokenizer that say how it is used.

    Raises:
        ConversionError: The file cannot be converted.
    """
    import tokenizers

    config = read_configuration(output if file_format is Format.TEKKEN else folder)
    content = read_source(folder, name)
    if file_format is Format.TEKKEN:
        tokenizer, named = convert_tekken(content)
    else:
        added, special = configured_tokens(folder, config)
        if file_format is Format.TIKTOKEN:
            check_family(name, read_model(folder)[0])
            tokenizer, named = convert_tiktoken(content, name, config, added, special)
            if not added:
                check_size(name, tokenizer, read_model(folder)[1])
        else:
            tokenizer, named = convert_sentencepiece(content, config, added, special)
    text = json.dumps(tokenizer, ensure_ascii=False)
    try:
        tokenizers.Tokenizer.from_str(text).encode("a b\n1")
    except BaseException as error:  # the library raises bare Exception, and a panic is not even that
        raise ConversionError(f"{name} is damaged: what it converts to is no tokenizer") from error
    config.pop("added_tokens_decoder", None)  # they are in the tokenizer
    if file_format is Format.TEKKEN and not has_template(output) and (template := tekken_template(folder / name)):
        (output / "chat_template.jinja").write_text(template, encoding="utf-8")
    (output / "tokenizer.json").write_text(text, encoding="utf-8")
    (output / "tokenizer_config.json").write_text(json.dumps({**named, **config}, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    """Converts under limits of memory and processor time."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS))
    folder, output, file_format, name = sys.argv[1:]
    try:
        convert(Path(folder), Path(output), Format(file_format), name)
    except (ConversionError, ModelFilesError) as error:
        sys.stdout.write(str(error).removesuffix("."))
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
