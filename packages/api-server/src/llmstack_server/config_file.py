"""`--config FILE`: flags out of a YAML file; what the command line says itself wins."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 1 << 20


class ConfigFileAction(argparse.Action):
    """The flag itself; the command's parser asks it what the file says."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Keeps the path."""
        setattr(namespace, self.dest, values)

    def settings(self, path: str) -> Mapping[str, Any]:
        """Flag to value; keys may be written with `-` or `_`, as in `max_model_len: 4096`.

        Raises:
            argparse.ArgumentTypeError: The file cannot be read, or is no mapping.
        """
        return read_settings(path)


def read_settings(path: str) -> dict[str, Any]:
    """As `ConfigFileAction.settings`."""
    import yaml  # late: most starts need none

    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise argparse.ArgumentTypeError(f"the file has more than {MAX_FILE_BYTES} bytes")
        found = yaml.safe_load(content)
    except OSError as error:
        raise argparse.ArgumentTypeError(error.strerror or "it cannot be read") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"it is no YAML: {' '.join(str(error).split())[:200]}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise argparse.ArgumentTypeError("it must map flags to values, such as 'port: 8000'")
    settings = {_flag(key): value for key, value in found.items()}
    if len(settings) < len(found):
        raise argparse.ArgumentTypeError("a flag is set twice, under two spellings")
    return settings


def _flag(key: str) -> str:
    base, dot, keys = key.partition(".")
    name = base.replace("_", "-")
    return f"--{'model' if name == 'model-tag' else name}{dot}{keys}"
