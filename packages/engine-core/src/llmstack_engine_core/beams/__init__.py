"""Beam search as requests of the scheduler."""

from llmstack_engine_core.beams.beam_search import Beam, BeamSearch, CompleteBeam
from llmstack_engine_core.beams.beam_searches import BeamSearches

__all__ = ["Beam", "BeamSearch", "BeamSearches", "CompleteBeam"]
