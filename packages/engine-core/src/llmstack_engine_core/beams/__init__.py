"""Beam search: the bookkeeping of one search, and a scheduler that runs searches as rows of the one within it."""

from llmstack_engine_core.beams.beam_scheduler import BeamScheduler
from llmstack_engine_core.beams.beam_search import Beam, BeamSearch, CompleteBeam

__all__ = ["Beam", "BeamScheduler", "BeamSearch", "CompleteBeam"]
