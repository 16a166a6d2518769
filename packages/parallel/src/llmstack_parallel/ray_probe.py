"""Probe of a Ray cluster for a token: exit status of `python -m ... HOST:PORT`."""

from __future__ import annotations

import importlib
import sys

ASKS_FOR_TOKEN = 3
ASKS_FOR_NOTHING = 0
DOES_NOT_ANSWER = 4


def main(address: str) -> int:
    """The exit status; the environment must hold no token."""
    client_class = importlib.import_module("ray._raylet").GcsClient
    errors = importlib.import_module("ray.exceptions")
    try:
        client_class(address=address).internal_kv_keys(b"llmstack", None, 10)
    except errors.AuthenticationError:
        return ASKS_FOR_TOKEN
    except Exception as error:  # noqa: BLE001  # of the connection; Ray has many kinds
        sys.stderr.write(f"{type(error).__name__}\n")
        return DOES_NOT_ANSWER
    return ASKS_FOR_NOTHING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
