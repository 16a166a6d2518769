"""`--state-dir`: the private folder of one server, and the secret in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from llmstack_engine_core.private_folder import (
    NUM_SECRET_BYTES,
    PrivateFolderError,
    lock,
    open_folder,
    read_or_make_secret,
)
from llmstack_server.options.errors import ServeError
from llmstack_server.state.state_folder import SECRET_FILE

LOCK_FILE = "lock"
MODELS_FOLDER = "models"


@contextmanager
def deployment_secret(path: str | None) -> Iterator[bytes]:
    """The secret of a deployment: a new one without a folder, else that in the folder, which this server then holds.

    Raises:
        ServeError: The folder or a file in it is not ours alone, or another server uses it; the text is one sentence.
    """
    if path is None:
        yield os.urandom(NUM_SECRET_BYTES)
        return
    name = f"--state-dir {path}"
    with ExitStack() as stack:
        with _refusals(path):
            folder = open_folder(name, path)
            stack.callback(os.close, folder)
            stack.callback(os.close, lock(name, folder, LOCK_FILE))
            secret = read_or_make_secret(name, folder, SECRET_FILE)
        yield secret


def folder_of_model(path: str, file_name: str) -> str:
    """The folder of one of several models in that of the server, as private; it is made where there is none.

    Raises:
        ServeError: It is not ours alone.
    """
    of_all = os.path.join(path, MODELS_FOLDER)
    of_one = os.path.join(of_all, file_name)
    for folder in (of_all, of_one):
        with _refusals(path):
            os.close(open_folder(f"--state-dir {folder}", folder))
    return of_one


def check_state_folder(path: str) -> bool:
    """Whether the folder exists, and could be used by a server that starts now; nothing is written.

    Raises:
        ServeError: It could not; the text is that of a start.
    """
    if not os.path.lexists(path):
        parent = os.path.dirname(os.path.abspath(path))
        if not os.access(parent, os.W_OK | os.X_OK):
            reason = errno.EACCES if os.path.isdir(parent) else errno.ENOENT
            raise ServeError(f"--state-dir {path} cannot be used: {os.strerror(reason)}")
        return False
    name = f"--state-dir {path}"
    with _refusals(path), ExitStack() as stack:
        folder = open_folder(name, path, may_create=False)
        stack.callback(os.close, folder)
        with suppress(FileNotFoundError):  # no server has used it
            os.close(lock(name, folder, LOCK_FILE, may_create=False))
    return True


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except PrivateFolderError as error:
        raise ServeError(str(error)) from None
    except OSError as error:
        raise ServeError(f"--state-dir {path} cannot be used: {error.strerror}") from None
