"""Choice among several engine cores: by what they have cached, and by load."""

from llmstack_engine_core.routing.index import RoutingIndex
from llmstack_engine_core.routing.policy import ReplicaLoad, RoutingPolicy, choose_replica
from llmstack_engine_core.routing.router import Router

__all__ = ["ReplicaLoad", "Router", "RoutingIndex", "RoutingPolicy", "choose_replica"]
