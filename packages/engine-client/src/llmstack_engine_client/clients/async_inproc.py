"""Client of an engine core on a thread of this process.

It serves an event loop, without a second process and without encoding.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.engine_loop import EngineLoop
from llmstack_engine_core.messages.control import ControlCall
from llmstack_engine_core.messages.protocol import ClientMessage, EngineMessage, Hello, StartFailed
from llmstack_types import Control, LLMStackError

logger = logging.getLogger(__name__)

_CLIENT = b"inproc"


class _ThreadLoop(EngineLoop):
    """The loop with one client, whose messages come through a queue."""

    def __init__(
        self, core: EngineCore, messages: queue.SimpleQueue[ClientMessage], post: Callable[[EngineMessage], None]
    ) -> None:
        super().__init__(core)
        self._messages = messages
        self._post = post

    def _receive(self, wait_ms: int) -> bool:
        num_messages = 0
        with contextlib.suppress(queue.Empty):
            if wait_ms:
                self._handle(_CLIENT, self._messages.get(timeout=wait_ms / 1000))
                num_messages += 1
            for _ in range(self._messages.qsize()):
                self._handle(_CLIENT, self._messages.get_nowait())
                num_messages += 1
        return num_messages > 0

    def _send(self, client: bytes, message: EngineMessage) -> None:
        self._post(message)


class AsyncInprocClient(AsyncClient):
    """Starts the thread at once, also outside a running loop.

    Steps and the event loop share the interpreter, and a crash of native code ends both; in exchange a debugger sees
    everything, and nothing is copied.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.start_timeout_s)
        self._config = config
        self._messages: queue.SimpleQueue[ClientMessage] = queue.SimpleQueue()
        self._arrived: deque[EngineMessage] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_shut_down = False
        # A daemon, since nothing can interrupt a model's loading.
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._messages.put(Hello())
        self._thread.start()

    async def shutdown(self) -> None:
        """Stops the engine core; one that is in a long step or loading is left to end with the process. Idempotent."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._mailbox.set_dead("the engine core has been shut down")
        self._messages.put(ControlCall(0, Control.SHUTDOWN))
        self._wake()
        await asyncio.to_thread(self._thread.join, self._config.shutdown_grace_s)

    async def _send(self, message: ClientMessage) -> None:
        self._attach()
        self._messages.put(message)

    def _attach(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._take_arrived()

    def _take_arrived(self) -> None:
        while self._arrived:
            self._mailbox.take(self._arrived.popleft())
        self._wake()

    def _post(self, message: EngineMessage) -> None:
        """Called by the engine core's thread."""
        self._arrived.append(message)
        loop = self._loop  # where it is None, `_attach` sets it and reads the messages afterwards
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(self._take_arrived)

    def _run(self) -> None:
        try:
            core = build_engine_core(self._config)
        except (LLMStackError, ValueError) as error:  # meant for the user
            self._post(StartFailed(str(error).strip().partition("\n")[0]))
            return
        except Exception as error:  # a bug, or a device that fails: the text is not meant for the user
            logger.exception("the engine core cannot start")
            self._post(StartFailed(f"an unexpected {type(error).__name__}; the log says more"))
            return
        try:
            _ThreadLoop(core, self._messages, self._post).run()
        except LLMStackError as error:  # the client has been notified
            logger.error("the engine core ends: %s", error)
        except Exception:  # the client has been notified; the traceback is for the log alone
            logger.exception("the engine core failed")
        finally:
            core.shutdown()
