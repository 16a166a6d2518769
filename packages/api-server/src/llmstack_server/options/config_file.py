"""Files of options in YAML, as `--config FILE` reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmstack_llm.options.resolve import ConfigFile

if TYPE_CHECKING:
    import yaml

MAX_FILE_BYTES = 1 << 20
_NONE: Mapping[str, str] = MappingProxyType({})


def read_config_file(path: str, key_flags: Mapping[str, str] = _NONE) -> ConfigFile:
    """Flags and their values; keys may be written with `-` or `_`, as in `max_model_len: 4096`, and as flags.

    `key_flags`: Flags that stand for one key of another flag, to that flag and key.

    Raises:
        ValueError: The file cannot be read, or is no mapping; one sentence.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be read") from None
    found = read_mapping(content)
    settings = {flag_of(key, key_flags): value for key, value in found.items()}
    if len(settings) < len(found):
        raise ValueError("an option is set twice, under two spellings")
    return ConfigFile(path, settings)


def read_mapping(content: bytes) -> dict[str, object]:
    """The mapping that a file of YAML holds, by a loader that makes plain values alone; empty for an empty file.

    Raises:
        ValueError: It is too long, no YAML, or no mapping of texts, or it has a key twice; one sentence.
    """
    import yaml  # late: most starts need none

    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the file has more than {MAX_FILE_BYTES} bytes")
    try:
        node = yaml.compose(content, yaml.SafeLoader)
        found = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if found is None:
        return {}
    if not isinstance(node, yaml.MappingNode) or not all(isinstance(key, str) for key in found):
        raise ValueError("it must map options to values, such as 'port: 8000'")
    if (key := _repeated_key(node)) is not None:  # `found` has one of two equal keys
        raise ValueError(f"{key!r} is set twice")
    return dict(found)


def _repeated_key(root: yaml.Node) -> str | None:
    """A key that a mapping has twice, at any depth; each node is visited once, also where aliases share it."""
    import yaml  # late, as above

    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = Counter(str(key.value) for key, _ in node.value)
            if len(keys) < keys.total():
                return keys.most_common(1)[0][0]
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    return None


def flag_of(key: str, key_flags: Mapping[str, str] = _NONE) -> str:
    """The flag that a key of a file means, such as `--max-model-len` for `max_model_len`."""
    base, dot, keys = key.removeprefix("--").partition(".")
    name = base.replace("_", "-")
    flag = f"--{'model' if name == 'model-tag' else name}"
    return key_flags.get(flag, flag) + dot + keys
