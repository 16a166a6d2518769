"""Files of options in YAML, as `--config FILE` reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from llmstack_llm.options.resolve import ConfigFile

MAX_FILE_BYTES = 1 << 20
_NONE: Mapping[str, str] = MappingProxyType({})


def read_config_file(path: str, key_flags: Mapping[str, str] = _NONE) -> ConfigFile:
    """Flags and their values; keys may be written with `-` or `_`, as in `max_model_len: 4096`, and as flags.

    `key_flags`: Flags that stand for one key of another flag, to that flag and key.

    Raises:
        ValueError: The file cannot be read, or is no mapping; one sentence.
    """
    import yaml  # late: most starts need none

    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the file has more than {MAX_FILE_BYTES} bytes")
    try:
        node = yaml.compose(content, yaml.SafeLoader)
        found = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if found is None:
        return ConfigFile(path, {})
    if not isinstance(node, yaml.MappingNode) or not all(isinstance(key, str) for key in found):
        raise ValueError("it must map options to values, such as 'port: 8000'")
    spellings = Counter(key.value for key, _ in node.value)  # `found` has one of two equal keys
    if len(spellings) < spellings.total():
        raise ValueError(f"{spellings.most_common(1)[0][0]!r} is set twice")
    settings = {_flag(key, key_flags): value for key, value in found.items()}
    if len(settings) < len(found):
        raise ValueError("an option is set twice, under two spellings")
    return ConfigFile(path, settings)


def _flag(key: str, key_flags: Mapping[str, str]) -> str:
    base, dot, keys = key.removeprefix("--").partition(".")
    name = base.replace("_", "-")
    flag = f"--{'model' if name == 'model-tag' else name}"
    return key_flags.get(flag, flag) + dot + keys
