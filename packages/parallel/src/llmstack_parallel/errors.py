"""The error of a rank that is lost."""

from __future__ import annotations

from llmstack_types import LLMStackError


class LostRankError(LLMStackError):
    """A rank has ended or does not answer: the steps under way are lost, and the engine core ends.

    It is never an error of a request. Its client starts another engine core, which resumes all requests.
    """
