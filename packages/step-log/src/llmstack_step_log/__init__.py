"""The step log: every input of the scheduler, and the hash of its decisions."""

from llmstack_step_log.deferred_log import DeferredLog
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.header import LogHeader, make_marker
from llmstack_step_log.logged_scheduler import LoggedScheduler
from llmstack_step_log.reader import RecordedRun, Run, read_step_log
from llmstack_step_log.sinks import FileSink, RingSink, Sink
from llmstack_step_log.step_log import StepLog

__all__ = [
    "DeferredLog",
    "FileSink",
    "LogHeader",
    "LoggedScheduler",
    "RecordedRun",
    "RingSink",
    "Run",
    "Sink",
    "StepLog",
    "StepLogError",
    "make_marker",
    "read_step_log",
]
