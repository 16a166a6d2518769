"""Simulation of request traces with the real scheduler and cache.

A virtual clock and a cost model replace the model, so torch is not needed.
"""

from llmstack_engine_client.prediction.cost_model import CostModel, LinearCostModel, StepWork, fit_cost_model
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.simulate.calibration import load_cost_model, measured_steps
from llmstack_insight.simulate.replicas import simulate_replicas
from llmstack_insight.simulate.report import Report
from llmstack_insight.simulate.simulation import Arrivals, SimulationConfig, simulate
from llmstack_insight.simulate.traces import TraceFormat, TraceRequest, read_trace

__all__ = [
    "Arrivals",
    "CostModel",
    "LinearCostModel",
    "Report",
    "SimulationConfig",
    "SimulationError",
    "StepWork",
    "TraceFormat",
    "TraceRequest",
    "fit_cost_model",
    "load_cost_model",
    "measured_steps",
    "read_trace",
    "simulate",
    "simulate_replicas",
]
