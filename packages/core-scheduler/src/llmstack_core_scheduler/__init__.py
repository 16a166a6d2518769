"""A continuous-batching scheduler as a pure function.

It has one token budget, chunked prefill, preemption and forks.
"""

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.preemption import AlwaysRecompute, AlwaysSwap, CheapestPreemption, PreemptionPolicy
from llmstack_core_scheduler.protocols import DraftSource, KVCacheManager
from llmstack_core_scheduler.request import Rank, Request
from llmstack_core_scheduler.request_queue import (
    DeadlinePolicy,
    FairPolicy,
    FCFSPolicy,
    PriorityPolicy,
    RequestQueue,
    SchedulingPolicy,
)
from llmstack_core_scheduler.scheduler import Scheduler
from llmstack_core_scheduler.speculative_config import SpeculativeConfig
from llmstack_types import RequestStatus

__all__ = [
    "AlwaysRecompute",
    "AlwaysSwap",
    "CheapestPreemption",
    "DeadlinePolicy",
    "DraftSource",
    "FCFSPolicy",
    "FairPolicy",
    "KVCacheManager",
    "PreemptionPolicy",
    "PriorityPolicy",
    "Rank",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "SchedulingPolicy",
    "SpeculativeConfig",
]
