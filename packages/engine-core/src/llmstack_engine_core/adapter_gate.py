"""Adapters of an engine core: read beside the steps, kept while they are used."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, cast

from llmstack_engine_core.protocols import AdapterRunner
from llmstack_engine_core.stages import AbsentStage, Operations, Ready, Stage
from llmstack_types import Control, EngineCoreRequest, InvalidRequestError, LoRAIdentity, RequestStatus

logger = logging.getLogger(__name__)

LOADING: Final = "loading"
LOADED: Final = "loaded"
NOT_LOADED: Final = "The adapter could not be loaded; the engine core's log says more."
TOO_MANY: Final = "Too many adapters wait to be loaded; try again."
NOT_SERVED: Final = "The model has no adapter of this name."
MAX_NUM_WAITING: Final = 1024
"""Adapters that wait to be read."""


class AdapterGate(Stage):
    """Holds requests until their adapters are in memory; other requests overtake them.

    One adapter is read at a time, in a thread. At most `max_adapters` are kept; the one that was used least recently
    gives its place, unless a request uses it.

    Attributes:
        waiting: Request id to the request, of those that wait for their adapters.
    """

    def __init__(
        self,
        runner: AdapterRunner,
        max_adapters: int,
        num_steps_under_way: int,
        on_status: Callable[[str, RequestStatus], None],
    ) -> None:
        """`num_steps_under_way`: Steps that may still use the adapter of a request that has ended."""
        self.waiting: dict[str, EngineCoreRequest] = {}
        self._runner = runner
        self._max_adapters = max_adapters
        self._num_steps_under_way = num_steps_under_way
        self._on_status = on_status
        self._users: OrderedDict[str, int] = OrderedDict()  # adapters in memory, the most recently used last
        self._request_id_to_adapter: dict[str, str] = {}
        self._paths: OrderedDict[str, str] = OrderedDict()  # to be read, in this order
        self._reading: tuple[str, Future[object]] | None = None
        self._ready: list[Ready] = []
        self._errors: OrderedDict[str, str] = OrderedDict()
        self._unloaded: set[str] = set()
        self._leaving: deque[tuple[int, str]] = deque()  # adapters without users, and the steps that they stay
        self._step = 0
        self._thread = ThreadPoolExecutor(1, "read-adapter")

    @property
    def is_busy(self) -> bool:
        """Whether an adapter waits to be read, or to be placed."""
        return bool(self._paths or self._ready) or self._reading is not None

    @property
    def is_in_use(self) -> bool:
        """Whether requests have adapters or wait for them, or an adapter comes or goes."""
        return bool(self.waiting or self._request_id_to_adapter or self._leaving) or self.is_busy

    def operations(self) -> Operations:
        """Loads and unloads adapters by name."""
        return {Control.LOAD_ADAPTER: self.load, Control.UNLOAD_ADAPTER: self.unload}

    def check(self, request: EngineCoreRequest) -> None:
        """Refuses a name that is no identity.

        Raises:
            InvalidRequestError: It is none.
        """
        try:
            LoRAIdentity.parse(request.lora_name or "")
        except ValueError:
            raise InvalidRequestError(NOT_SERVED, param="model") from None

    def hold(self, request: EngineCoreRequest) -> bool:
        """Notes a request that names an adapter; True if it has to wait for it.

        Raises:
            InvalidRequestError: Too many adapters wait, or this one is being unloaded.
        """
        name = request.lora_name or ""
        if name in self._unloaded:
            raise InvalidRequestError("The adapter has been unloaded.", param="model", code="model_not_found")
        if name in self._users:
            self._use(request.request_id, name)
            return False
        self._ask_for(name, request.lora_path)
        self.waiting[request.request_id] = request
        self._on_status(request.request_id, RequestStatus.WAITING_FOR_ADAPTER)
        return True

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended."""
        for request_id in request_ids:
            self.waiting.pop(request_id, None)
            name = self._request_id_to_adapter.pop(request_id, None)
            if name is not None:
                self._users[name] -= 1
                if not self._users[name] and name in self._unloaded:
                    self._drop(name)

    def load(self, name: str, path: str) -> str:
        """Asks for an adapter: `LOADED`, `LOADING` for a caller who asks again, or a sentence on why it cannot be."""
        self._advance()
        error = self._errors.pop(name, None)
        if error is not None:
            return error
        self._unloaded.discard(name)
        if name in self._users:
            return LOADED
        try:
            self._ask_for(name, path)
        except InvalidRequestError as refusal:
            return refusal.message
        return LOADING

    def unload(self, name: str) -> bool:
        """Takes no further requests for an adapter, and drops it when the last one has ended; whether it was known."""
        is_reading = self._reading is not None and self._reading[0] == name
        was_known = name in self._users or name in self._paths or is_reading
        if self._users.get(name) or is_reading or self._waiting_for(name):
            self._unloaded.add(name)
        elif name in self._users:
            self._drop(name)
        else:
            self._paths.pop(name, None)
        return was_known

    def take_ready(self, wait_s: float) -> list[Ready]:
        """The requests whose adapters are in memory now, or have an error; waits at most `wait_s` for the next one."""
        if wait_s and self._reading is not None and not self._ready:
            wait([self._reading[1]], wait_s)
        self._advance()
        ready, self._ready = self._ready, []
        return [(request, error) for request, error in ready if self.waiting.pop(request.request_id, None)]

    def _advance(self) -> None:
        """Places an adapter that has been read, if there is room for it, and begins to read the next one."""
        self._begin_reading()
        if self._reading is None:
            return
        name, reading = self._reading
        if not reading.done() or not self._make_room():
            return
        self._reading = None
        error = self._place(name, reading)
        self._begin_reading()
        for request in self._waiting_for(name):
            if error is None:
                self._use(request.request_id, name)
            self._ready.append((request, error))
        if name in self._unloaded and not self._users.get(name):
            self._drop(name)

    def end_step(self, *, is_idle: bool) -> None:
        """Notes the end of a step; drops adapters that no step under way can use. `is_idle`: None is."""
        self._step += 1
        while self._leaving and (is_idle or self._leaving[0][0] <= self._step):
            self._runner.remove_adapter(self._leaving.popleft()[1])

    def lose_weights(self) -> None:
        """The runner has lost its adapters; there are no requests."""
        self._users.clear()
        self._leaving.clear()

    def shutdown(self) -> None:
        """Ends the thread once it has read its adapter."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask_for(self, name: str, path: str) -> None:
        if name in self._paths or (self._reading is not None and self._reading[0] == name):
            return
        if len(self._paths) >= MAX_NUM_WAITING:
            raise InvalidRequestError(TOO_MANY, param="model")
        self._paths[name] = path
        self._begin_reading()

    def _begin_reading(self) -> None:
        if self._reading is None and self._paths:
            name, path = self._paths.popitem(last=False)
            self._runner.announce_adapter(name, path)
            self._reading = name, self._thread.submit(self._runner.read_adapter, name, path)

    def _make_room(self) -> bool:
        """Whether one more adapter can be kept; False while all of them are used."""
        while len(self._users) >= self._max_adapters:
            unused = next((name for name, count in self._users.items() if not count), None)
            if unused is None:
                return False
            self._drop(unused)
        return True

    def _place(self, name: str, reading: Future[object]) -> InvalidRequestError | None:
        try:
            self._runner.add_adapter(name, reading.result())
        except Exception as error:  # of one adapter, which must not end the engine core
            if not isinstance(error, ValueError):
                logger.exception("the adapter %s could not be loaded", name[:128])
            text = str(error) if isinstance(error, ValueError) else NOT_LOADED
            self._errors[name] = text
            while len(self._errors) > MAX_NUM_WAITING:
                self._errors.popitem(last=False)
            return InvalidRequestError(text, param="model")
        self._users[name] = 0
        self._leaving = deque(entry for entry in self._leaving if entry[1] != name)  # it is used again
        return None

    def _use(self, request_id: str, name: str) -> None:
        self._request_id_to_adapter[request_id] = name
        self._users[name] += 1
        self._users.move_to_end(name)

    def _waiting_for(self, name: str) -> list[EngineCoreRequest]:
        return [request for request in self.waiting.values() if request.lora_name == name]

    def _drop(self, name: str) -> None:
        self._unloaded.discard(name)
        if self._users.pop(name, None) is not None:  # it could be read
            self._leaving.append((self._step + self._num_steps_under_way, name))


def make_adapter_gate(
    runner: object, max_adapters: int, num_steps_under_way: int, on_status: Callable[[str, RequestStatus], None]
) -> Stage:
    """The gate of a runner with adapters; one that refuses all requests where `max_adapters` is 0."""
    if not max_adapters:
        answers: Operations = {
            Control.LOAD_ADAPTER: lambda identity, path: "Adapters are not enabled.",
            Control.UNLOAD_ADAPTER: lambda identity: False,
        }
        return AbsentStage(NOT_SERVED, "model", answers)
    return AdapterGate(cast(AdapterRunner, runner), max_adapters, num_steps_under_way, on_status)
