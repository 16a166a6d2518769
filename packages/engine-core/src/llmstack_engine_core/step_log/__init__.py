"""The log of a run: every input of the scheduler, from which its decisions can be derived again, and their hash."""

from llmstack_engine_core.step_log.errors import StepLogError
from llmstack_engine_core.step_log.header import LogHeader
from llmstack_engine_core.step_log.reader import RecordedRun, read_step_log
from llmstack_engine_core.step_log.recording_scheduler import RecordingScheduler
from llmstack_engine_core.step_log.sinks import FileSink, RingSink
from llmstack_engine_core.step_log.step_log import StepLog

__all__ = [
    "FileSink",
    "LogHeader",
    "RecordedRun",
    "RecordingScheduler",
    "RingSink",
    "StepLog",
    "StepLogError",
    "read_step_log",
]
