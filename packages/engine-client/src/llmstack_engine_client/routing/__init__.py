"""Choice among several engine cores: by what they have cached, and by load."""

from llmstack_engine_client.routing.index import RoutingIndex
from llmstack_engine_client.routing.policy import ReplicaLoad, RoutingPolicy, choose_replica
from llmstack_engine_client.routing.router import Router

__all__ = ["ReplicaLoad", "Router", "RoutingIndex", "RoutingPolicy", "choose_replica"]
