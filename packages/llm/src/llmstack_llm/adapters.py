"""LoRA adapters by the names that requests use."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmstack_llm import request_errors
from llmstack_llm.requests import Adapter, AdmittedRequest
from llmstack_model_files import ModelFilesError, adapter_digest
from llmstack_types import InvalidRequestError, LoRAIdentity

OnChange = Callable[[], Awaitable[None]]

MAX_NUM_NAMES: Final = 4096
LOADED: Final = "loaded"
_LOADING: Final = "loading"
_POLL_S: Final = 0.01
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request, as vLLM's class has it.

    Attributes:
        lora_name: A name of up to 64 letters, digits, dots, dashes and underscores.
        lora_int_id: Accepted and not used: name and content distinguish adapters.
        lora_path: Folder with `adapter_config.json` and `adapter_model.safetensors`.
        base_model_name: The model that the adapter was trained on, for lists.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    base_model_name: str | None = None


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one or None for each."""


def lora_request_of(identity: str, path: str) -> LoRARequest:
    """The adapter of an engine request, as a caller names it."""
    return LoRARequest(LoRAIdentity.parse(identity).name, lora_path=path)


class AdapterRegistry:
    """The adapters of one front end. A name that is loaded again gets another identity.

    Several front ends of the same engine cores get equal registries by `snapshot` and `merge`, in any order.
    """

    def __init__(
        self, *, is_enabled: bool = False, max_bytes: int = 1 << 30, media_kinds: Collection[str] = ()
    ) -> None:
        """`media_kinds`: Kinds of items whose prompts have the adapter of that name, unless they name another one."""
        self.is_enabled = is_enabled
        self.media_kinds = tuple(media_kinds)
        self._max_bytes = max_bytes
        self._adapters: dict[str, Adapter] = {}
        self._removed: OrderedDict[str, None] = OrderedDict()  # identities, so that no late snapshot adds them again
        self._generation = 0

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters that requests can name, in the order in which they were loaded."""
        return list(self._adapters.values())

    def find(self, name: str) -> Adapter | None:
        """The adapter of a name, if there is one."""
        return self._adapters.get(name)

    def adapted(self, prompt: AdmittedRequest, asked: Adapter | None) -> AdmittedRequest:
        """A prompt with the adapter that is asked for, or else with that of its items.

        Raises:
            InvalidRequestError: Its items are of several kinds with an adapter each, or the adapter was unloaded.
        """
        kinds = {one.kind for one in prompt.placed} | {one.kind for one in prompt.media}
        names = [kind for kind in self.media_kinds if kind in kinds]
        if asked is None and names:
            asked = self.find(names[0])
            if len(names) > 1:
                reason = f"items of the kinds {' and '.join(names)} have an adapter each: name one as the model"
                raise request_errors.invalid_value(prompt.param, reason)
            if asked is None:
                raise request_errors.invalid_value(prompt.param, f"the adapter for {names[0]} is not loaded")
        return prompt if asked is None else dataclasses.replace(prompt, adapter=asked)

    def check(self, name: str, path: str) -> None:
        """Checks what a caller asks to load.

        Raises:
            InvalidRequestError: Adapters are not enabled, or name or path cannot be one.
        """
        if not self.is_enabled:
            raise request_errors.unsupported_parameter("lora_name", "adapters without --enable-lora")
        if not _NAME.fullmatch(name):
            reason = "expected 1 to 64 letters, digits, dots, dashes or underscores"
            raise request_errors.invalid_value("lora_name", reason)
        if not path or "\0" in path:
            raise request_errors.invalid_value("lora_path", "expected the path of a folder")
        if name not in self._adapters and len(self._adapters) >= MAX_NUM_NAMES:
            raise request_errors.invalid_value("lora_name", f"there are {MAX_NUM_NAMES} adapters already")

    def identify(self, name: str, path: str, base_model_name: str | None = None) -> Adapter:
        """Reads the digest of an adapter's files; it is not known under its name before `add`.

        Raises:
            InvalidRequestError: The files cannot be read.
        """
        folder = Path(path).absolute()
        try:
            digest = adapter_digest(folder, self._max_bytes)
        except ModelFilesError as error:
            raise request_errors.invalid_value("lora_path", str(error).removesuffix(".")) from error
        self._generation += 1
        return Adapter(name, str(LoRAIdentity(name, digest, self._generation)), str(folder), base_model_name)

    def add(self, adapter: Adapter) -> Adapter | None:
        """Makes an adapter known under its name; the one that had the name before."""
        before = self.remove(adapter.name)
        self._adapters[adapter.name] = adapter
        return before

    def remove(self, name: str) -> Adapter | None:
        """Forgets a name; the adapter that had it."""
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            self._note_removed(adapter.identity)
        return adapter

    def snapshot(self) -> dict[str, Any]:
        """The adapters, and the identities of those that were removed, as plain values."""
        fields = [[one.name, one.identity, one.path, one.base_model_name] for one in self._adapters.values()]
        return {"adapters": fields, "removed": [*self._removed]}

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Takes what another registry has loaded and removed; of two loads of a name the later one stays."""
        for identity in snapshot["removed"]:
            name, _, generation = LoRAIdentity.parse(identity)
            self._generation = max(self._generation, generation)
            known = self._adapters.get(name)
            if known is not None and known.identity == identity:
                del self._adapters[name]
            self._note_removed(identity)
        for name, identity, path, base_model_name in snapshot["adapters"]:
            generation = LoRAIdentity.parse(identity).generation
            self._generation = max(self._generation, generation)
            known = self._adapters.get(name)
            is_later = known is None or LoRAIdentity.parse(known.identity).generation < generation
            if is_later and identity not in self._removed:
                self.add(Adapter(name, identity, path, base_model_name))

    def _note_removed(self, identity: str) -> None:
        self._removed[identity] = None
        if len(self._removed) > MAX_NUM_NAMES:
            self._removed.popitem(last=False)

    def resolve(self, request: LoRARequest, load: Callable[[str, str], str]) -> Adapter:
        """The adapter of an offline request; a new one is loaded by `load`, which is asked until it has an answer.

        Raises:
            InvalidRequestError: It cannot be served.
        """
        self.check(request.lora_name, request.lora_path)
        adapter = self.identify(request.lora_name, request.lora_path, request.base_model_name)
        known = self._adapters.get(request.lora_name)
        if (
            known is not None
            and LoRAIdentity.parse(known.identity).digest == LoRAIdentity.parse(adapter.identity).digest
        ):
            return known
        while (state := load(adapter.identity, adapter.path)) == _LOADING:
            time.sleep(_POLL_S)
        self._check_loaded(state)
        self.add(adapter)
        return adapter

    async def wait_until_loaded(self, adapter: Adapter, load: Callable[[str, str], Awaitable[str]]) -> None:
        """Asks `load` until the engine core has read and checked the adapter.

        Raises:
            InvalidRequestError: It cannot be served.
        """
        while (state := await load(adapter.identity, adapter.path)) == _LOADING:  # noqa: ASYNC110 - it only answers
            await asyncio.sleep(_POLL_S)
        self._check_loaded(state)

    def _check_loaded(self, state: str) -> None:
        if state != LOADED:
            raise InvalidRequestError(state, param="lora_path", code="invalid_value")
