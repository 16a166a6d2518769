"""Resolution of a model name, a folder or a repository id, to a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from llmstack_model_files.folder import ModelFilesError
from llmstack_model_files.gguf import SUFFIX, choose_files, only_gguf, open_gguf, split_quantization, with_projector
from llmstack_model_files.mistral_form import ANY_FORM, CONSOLIDATED, PARAMS_NAME, FileForm, in_form
from llmstack_model_files.registered import PACKAGED, RegisteredModel, find_packaged

logger = logging.getLogger(__name__)

_ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.model.v*", "*.tiktoken", "*.jinja")
# Of the two forms in which a repository may have its weights; subfolders hold the same model for other programs.
_HUB_WEIGHTS, _CONSOLIDATED = "model*.safetensors", f"{CONSOLIDATED}*"
# What sentence-transformers keeps in subfolders and is needed: how hidden states become a vector.
_MODULE_PATTERNS = ("*_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors")
_TEMPLATES_PATTERN = "additional_chat_templates/*.jinja"
_REPOSITORY_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_MISSPELT: Mapping[str, str] = {
    "gpt-2": "gpt2",
    "gpt-2-medium": "gpt2-medium",
    "gpt-2-large": "gpt2-large",
    "gpt-2-xl": "gpt2-xl",
    "openai/gpt2": "gpt2",
    "openai/gpt-2": "gpt2",
}
# The hub must answer within this time, so that a machine without a network fails at once.
_HUB_TIMEOUT_S = 5.0


ENTRY_POINT_GROUP = "llmstack.models"
"""Entry points of installed packages: a model's name, and a function that returns its folder or GGUF file."""


def resolve_model(
    name_or_path: str, revision: str | None = None, mmproj: str | None = None, form: FileForm = ANY_FORM
) -> Path:
    """The folder of a model: the folder itself, else an installed package's, else the hub's cache, else a download.

    A GGUF file, `repository:quantization`, or a folder with nothing but one GGUF file stands for a folder too, which is
    made in the user's cache. A name that llmstack or an installed package registers comes before a repository.

    A complete copy in the cache is used without asking the hub whether there is a newer one. The environment variables
    of huggingface-hub hold: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.

    `mmproj`: A GGUF file with an encoder of pictures, for a model in another one.
    `form`: Which files are read of a model that is there in Mistral's own form too; in it a folder stands for the
    model's, as for a GGUF file.

    Raises:
        ModelFilesError: Neither a folder nor a repository that can be reached; the text is one line that says why.
    """
    folder = _resolve(name_or_path, revision, form)
    return folder if mmproj is None else with_projector(folder, mmproj)


def _resolve(name_or_path: str, revision: str | None, form: FileForm) -> Path:
    folder = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(folder):
        return _checked_folder(folder, form)
    if folder.suffix == SUFFIX and os.path.isfile(folder):
        return open_gguf(folder)
    if "://" in name_or_path:
        raise ModelFilesError(_describe_address(name_or_path))
    if os.path.isfile(folder):
        raise ModelFilesError(f"{name_or_path[:256]} is a file, and neither a model's folder nor a GGUF file.")
    installed = find_packaged(name_or_path)
    if installed is None and is_local_name(name_or_path):
        kind = "file" if folder.suffix == SUFFIX else "folder"
        raise ModelFilesError(f"There is no {kind} {name_or_path[:256]}.")
    installed = installed or _find_installed(name_or_path)
    if installed is not None:
        return _opened(installed, name_or_path)
    if name_or_path in _MISSPELT:
        raise ModelFilesError(f"There is no model {name_or_path}; did you mean {_MISSPELT[name_or_path]}?")
    repository, quantization = split_quantization(name_or_path)
    if quantization and _is_repository_id(repository):
        return open_gguf(_find_gguf(repository, quantization, revision))
    if not _is_repository_id(name_or_path):
        raise ModelFilesError(
            f"{name_or_path[:128]!r} is neither a folder nor a repository id such as gpt2 or org/name."
        )
    return _find_repository(name_or_path, revision, form)


def _find_repository(name: str, revision: str | None, form: FileForm) -> Path:
    """The folder of a repository, from the hub's cache or downloaded."""
    cached = _find_cached(name, revision)
    if cached is not None and _is_complete(cached, form):
        return _in_form(cached, form)
    try:
        return _in_form(_download(name, revision, form), form)
    except ModelFilesError as error:
        if cached is None or not (cached / "config.json").is_file():
            raise
        logger.warning("%s Going on with the incomplete copy in the cache.", error)
        return cached


def _checked_folder(folder: Path, form: FileForm = ANY_FORM) -> Path:
    if form != ANY_FORM or any((folder / name).is_file() for name in ("config.json", PARAMS_NAME)):
        return _in_form(folder, form)
    file = only_gguf(folder)
    if file is None:
        raise ModelFilesError(f"The folder {folder} has no config.json, so it is no model.")
    return open_gguf(file)


def _opened(model: RegisteredModel, name: str) -> Path:
    if model.path.suffix != SUFFIX:
        return _checked_folder(model.path)
    named = {"registered_name": name} if model.generation_config else {}
    return open_gguf(model.path, {**model.generation_config, **named})


def _find_installed(name: str) -> RegisteredModel | None:
    """The model that an installed package registers as `name`; None where none does."""
    from importlib.metadata import entry_points  # late: reads the metadata of everything installed

    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            found = entry.load()()
            return found if isinstance(found, RegisteredModel) else RegisteredModel(Path(found))
        except Exception as error:  # foreign code: whatever it raises, its model is not available
            first_line = str(error).partition("\n")[0][:256]
            raise ModelFilesError(
                f"The installed model {name} ({entry.value}) cannot be opened: {type(error).__name__}: {first_line}"
            ) from error
    return None


def is_local_name(text: str) -> bool:
    """Whether a model is named by a path, a folder here, or a name of llmstack's own; else it may be downloaded."""
    return (
        text in PACKAGED
        or os.path.isdir(text)
        or text.startswith(("/", "./", "../", "~"))
        or text.count("/") > 1
        or text.endswith(SUFFIX)
        or text in {"", ".", ".."}
    )


def _describe_address(address: str) -> str:
    scheme, _, rest = address.partition("://")
    parts = rest.split("/")[1 if scheme.startswith("http") else 0 :]
    repository = "/".join(parts[:2])
    advice = (
        f"did you mean {repository}?" if scheme != "s3" and _is_repository_id(repository) else "download its files."
    )
    return f"{address[:128]!r} is an address, and a model is a folder or a repository id; {advice}"


def _is_repository_id(text: str) -> bool:
    parts = text.split("/")
    return len(text) <= 96 and all(
        part and _REPOSITORY_CHARACTERS.issuperset(part) and part[0] not in "-." and part[-1] not in "-."
        for part in parts
    )


def _in_form(folder: Path, form: FileForm) -> Path:
    if form == ANY_FORM and not any(folder.glob(f"{CONSOLIDATED}*.safetensors")) and (folder / "config.json").is_file():
        return folder
    return in_form(folder, form, has_hub_weights=_has_weights(folder))


def _is_complete(folder: Path, form: FileForm) -> bool:
    """Whether a copy in the cache has all that is read."""
    try:
        return _has_weights(_in_form(folder, form))
    except ModelFilesError:
        return False


def _has_weights(folder: Path) -> bool:
    from llmstack_model_files.weight_files import safetensors_files  # late: most callers pass a folder

    try:
        return bool(safetensors_files(folder))
    except ModelFilesError:
        return False


def _find_cached(repository: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download  # late: costs a third of a second, a folder needs none of it
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _find_gguf(repository: str, quantization: str, revision: str | None) -> Path:
    """The GGUF file of a repository, or the first of its parts, from the hub's cache or downloaded."""
    cached = _find_cached(repository, revision)
    paths = cached.rglob(f"*{SUFFIX}") if cached is not None else ()  # parts may be in a folder of their own
    names = [path.relative_to(cached or "").as_posix() for path in paths]
    try:
        return Path(cached or "") / choose_files(names, quantization, repository)[0]
    except ModelFilesError:
        return _download_gguf(repository, quantization, revision)


def _download_gguf(repository: str, quantization: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_download

    if constants.HF_HUB_OFFLINE:
        raise ModelFilesError(f"{repository}:{quantization} is not in the cache, and HF_HUB_OFFLINE is set.")
    try:
        found = HfApi().repo_info(repository, revision=revision, timeout=_HUB_TIMEOUT_S)
        files = getattr(found, "siblings", None) or ()  # other kinds of repositories have none
        names = choose_files((entry.rfilename for entry in files), quantization, repository)
        logger.info("downloading %s of %s at %s", ", ".join(names), repository, found.sha)
        paths = [Path(hf_hub_download(repository, name, revision=revision)) for name in names]
        return paths[0]
    except ModelFilesError:
        raise
    except Exception as error:  # of the network or the hub, whose libraries have many kinds
        raise ModelFilesError(_why_not(repository, revision, error)) from error


def _download(repository: str, revision: str | None, form: FileForm) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise ModelFilesError(
            f"{repository} is not in the cache, and HF_HUB_OFFLINE is set; unset it or name a folder with the model."
        )
    try:
        found = HfApi().repo_info(repository, revision=revision, timeout=_HUB_TIMEOUT_S)
        logger.info("downloading %s at %s", repository, found.sha)
        files = getattr(found, "siblings", None) or ()  # other kinds of repositories have none
        path = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(_ALLOW_PATTERNS),
            ignore_patterns=["*/*", *_second_copy((entry.rfilename for entry in files), form)],
        )
        more = [*_MODULE_PATTERNS] if (Path(path) / "modules.json").is_file() else []
        more += [_TEMPLATES_PATTERN] if any(fnmatch(each.rfilename, _TEMPLATES_PATTERN) for each in files) else []
        if more:
            snapshot_download(repository, revision=revision, allow_patterns=more)
    except Exception as error:  # of the network, the hub or the disk, which share no narrower type
        raise ModelFilesError(_why_not(repository, revision, error)) from error
    return Path(path)


def _second_copy(names: Iterable[str], form: FileForm) -> list[str]:
    """Patterns of the weights that are not read, where a repository has the same ones in two forms."""
    listed = list(names)
    if form.weights == "mistral":
        return [_HUB_WEIGHTS]
    has_only_own = any(fnmatch(name, _CONSOLIDATED) for name in listed) and not any(
        fnmatch(name, _HUB_WEIGHTS) for name in listed
    )
    return [] if has_only_own else [_CONSOLIDATED]


def _why_not(repository: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    has_token = bool(os.environ.get("HF_TOKEN"))
    if isinstance(error, errors.GatedRepoError):
        advice = "HF_TOKEN has no access to it" if has_token else "accept its terms on the hub and set HF_TOKEN"
        return f"The model {repository} is gated: {advice}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The model {repository} has no revision {str(revision)[:64]}."
    if status == 401 or isinstance(error, errors.RepositoryNotFoundError):
        advice = "HF_TOKEN does not open it" if has_token else "if it is private, set HF_TOKEN"
        return f"There is no model {repository} on the hub, or it is private ({_number(status)}); {advice}."
    if status is not None:
        return f"The hub refused {repository} ({_number(status)}); try again later or pass a folder that has the model."
    return (
        f"{repository} is not in the cache and the hub cannot be reached ({type(error).__name__}); "
        f"check the network, or set HF_HUB_OFFLINE=1 and pass a folder that has the model."
    )


def _number(status: Any) -> str:
    return f"HTTP {status}" if isinstance(status, int) else "not found"
