"""One model on several ranks of a host: tensor and pipeline parallel.

`llmstack_parallel.runner.ParallelRunner` is the model runner of an engine core with more than one rank.
"""

from llmstack_parallel.topology import Topology

__all__ = ["Topology"]
