"""Profiles of the model runner, bounded in steps, in files of one folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llmstack_engine_core.config import ProfilerConfig
from llmstack_engine_core.protocols import EventHook, ProfilingRunner
from llmstack_types import EngineCoreOutputs, EngineStartError, StepRecord

logger = logging.getLogger(__name__)

MAX_NUM_TRACES: Final = 100
"""Traces in the folder; with so many no further profile begins."""
NOT_ENABLED: Final = "Profiles are not enabled: --profiler-config names a folder for them."


class StepProfiles(EventHook):
    """Starts and stops the profiler of a model runner. Used by the engine core's thread, between steps."""

    def __init__(self, config: ProfilerConfig, runner: ProfilingRunner, clock: Callable[[], float] = time.time) -> None:
        """Creates the folder.

        Raises:
            EngineStartError: It cannot be created.
        """
        self._config = config
        self._runner = runner
        self._clock = clock
        self._folder = Path(config.torch_profiler_dir)
        self._num_left: int | None = None  # steps of the running profile
        self._written: list[str] = []
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EngineStartError(f"--profiler-config: cannot create {self._folder}: {error.strerror}") from error

    def start(self) -> str:
        """Begins a profile; empty, or a sentence on why not."""
        if self._num_left is not None:
            return "A profile is being recorded already."
        if sum(1 for _ in self._folder.glob("*.pt.trace.json*")) >= MAX_NUM_TRACES:
            return f"There are {MAX_NUM_TRACES} traces in the folder of profiles: remove some."
        config = self._config
        self._runner.start_profile(
            with_stack=config.torch_profiler_with_stack,
            with_memory=config.torch_profiler_with_memory,
            record_shapes=config.torch_profiler_record_shapes,
        )
        self._num_left = config.max_iterations
        return ""

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Ends a profile after its last step."""
        if self._num_left is None:
            return
        self._num_left -= 1
        if not self._num_left:
            self._write()

    def stop(self) -> str:
        """Ends the profile, if there is one; the traces written since the last call, one a line."""
        if self._num_left is not None:
            self._write()
        written, self._written = self._written, []
        return "\n".join(written)

    def _write(self) -> None:
        self._num_left = None
        ending = ".pt.trace.json.gz" if self._config.torch_profiler_use_gzip else ".pt.trace.json"
        path = str(self._folder / f"llmstack-{os.getpid()}-{int(self._clock() * 1000)}{ending}")
        try:
            self._runner.stop_profile(path)
        except (OSError, RuntimeError) as error:  # a full disk ends no request
            logger.error("the profile %s was not written: %s", path, error)
            return
        logger.info("profile: %s", path)
        self._written = [*self._written, path][-MAX_NUM_TRACES:]
