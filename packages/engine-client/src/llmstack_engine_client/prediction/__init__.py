"""Predictions: how long a step takes, and when the first token of a request comes.

Nothing here reads a clock. The server and the simulation of traces use it alike.
"""

from llmstack_engine_client.prediction.engine_predictor import MAX_NUM_COUNTED, EnginePredictor
from llmstack_engine_client.prediction.first_token import EngineLoad, FirstToken, QueuedTokens, StepLimits, first_token
from llmstack_engine_client.prediction.places import Places
from llmstack_engine_client.prediction.step_costs import StepCosts

__all__ = [
    "MAX_NUM_COUNTED",
    "EngineLoad",
    "EnginePredictor",
    "FirstToken",
    "Places",
    "QueuedTokens",
    "StepCosts",
    "StepLimits",
    "first_token",
]
