"""The engine loop and its process: schedule, execute, update, behind ZeroMQ with msgpack frames."""

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.engine_core import EngineCore

__all__ = ["EngineConfig", "EngineCore", "SchedulerConfig", "build_engine_core"]
