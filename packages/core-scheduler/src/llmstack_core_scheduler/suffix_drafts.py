"""Drafts by what followed before, in the request and in earlier answers.

The method is that of SuffixDecoding (Oliaro et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llmstack_core_scheduler.kept_answers import END, KeptAnswers
from llmstack_core_scheduler.protocols import DraftOwner
from llmstack_core_scheduler.speculative_config import SpeculativeConfig
from llmstack_core_scheduler.suffix_index import SHORTEST_MATCH, SuffixIndex

MAX_NUM_INDEXED_TOKENS: Final = 1 << 20
"""Tokens of running requests that are indexed at once; a request that finds no room has drafts by answers alone."""

MAX_NUM_KEPT_TOKENS: Final = 1 << 18
"""Tokens of answers that are kept, over all owners: about 40 MB."""


class _Draft(NamedTuple):
    """Guessed tokens, and how many of them are expected to be right."""

    score: float
    token_ids: list[int]


_NOTHING: Final = _Draft(0.0, [])


class SuffixDrafts:
    """A source of drafts that counts what followed where the last tokens occurred before.

    It looks in the request's own tokens and in the finished answers of the same owner. A longer match allows more
    drafts (`suffix_decoding_max_spec_factor`), and they end where the chance that all are right, by these counts, falls
    below `suffix_decoding_min_token_prob`. Of all lengths of matches that one counts of whose drafts the most are
    expected to be right.

    Attributes:
        num_indexed_tokens: Tokens of running requests that it has an index of.
        answers: Finished answers that are kept.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        max_num_indexed_tokens: int = MAX_NUM_INDEXED_TOKENS,
        max_num_kept_tokens: int = MAX_NUM_KEPT_TOKENS,
    ) -> None:
        self._depth, self._factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
        self._least_chance = config.suffix_decoding_min_token_prob
        self._max_num_indexed_tokens = max_num_indexed_tokens
        # The match and its drafts are not longer together than the depth.
        self._longest = max(SHORTEST_MATCH, int(self._depth / (1.0 + self._factor)))
        self.num_indexed_tokens = 0
        self.answers = KeptAnswers(config.suffix_decoding_max_cached_requests, max_num_kept_tokens)
        self._indices: dict[str, SuffixIndex] = {}

    def propose(
        self, request_id: str, token_ids: Sequence[int], max_num_tokens: int, owner: DraftOwner
    ) -> Sequence[int]:
        """As many guesses as the counts allow; none where the last tokens are new."""
        best = _NOTHING
        for index in (self._own_index(request_id, token_ids), self.answers.of(owner)):
            if index is not None:
                found = self._best_draft(index, token_ids, max_num_tokens)
                best = found if found.score > best.score else best
        return best.token_ids

    def learn(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """Keeps an answer for later requests of the same owner, unless it is too short to match."""
        if len(token_ids) > SHORTEST_MATCH:
            self.answers.add(owner, token_ids)

    def forget(self, request_id: str) -> None:
        """Drops the index of the request's own tokens."""
        index = self._indices.pop(request_id, None)
        if index is not None:
            self.num_indexed_tokens -= index.end

    def _own_index(self, request_id: str, token_ids: Sequence[int]) -> SuffixIndex | None:
        """The index of all these tokens, or None where there is no room for it."""
        index = self._indices.get(request_id)
        num_known = 0 if index is None else index.end
        num_new = len(token_ids) - num_known
        if num_new > self._max_num_indexed_tokens - self.num_indexed_tokens:
            return None
        if index is None:
            index = self._indices[request_id] = SuffixIndex()
        index.extend(token_ids[num_known:])
        self.num_indexed_tokens += num_new
        return index

    def _best_draft(self, index: SuffixIndex, token_ids: Sequence[int], max_num_tokens: int) -> _Draft:
        found = index.find(token_ids, self._longest)
        found.sort(key=lambda one: -one.length)  # of one length, the latest stays first
        best = _NOTHING
        for count, (_, length) in enumerate(found, 1):
            if count < len(found) and found[count].length == length:
                continue
            limit = min(max_num_tokens, int(length * self._factor), self._depth - length)
            if limit <= best.score:
                break  # no more can be right, and of a shorter match neither
            draft = _follow(index, [one.end for one in found[:count]], limit, self._least_chance)
            best = draft if draft.score > best.score else best
        return best


def _follow(index: SuffixIndex, places: list[int], limit: int, least_chance: float) -> _Draft:
    """The tokens that followed most often; what reaches the end of a text of its own goes on with the draft."""
    chance, score, draft = 1.0, 0.0, list[int]()
    while len(draft) < limit:
        token_to_places: dict[int, list[int]] = {}
        for place in places:
            token_id = index.token_at(place) if place < index.end else draft[place - index.end]
            token_to_places.setdefault(token_id, []).append(place + 1)
        token_to_places.pop(END, None)
        if not token_to_places:
            break
        token_id = max(token_to_places, key=lambda one: len(token_to_places[one]))  # the latest of equal ones
        chance *= len(token_to_places[token_id]) / len(places)
        if chance < least_chance:
            break
        score += chance
        draft.append(token_id)
        places = token_to_places[token_id]
    return _Draft(score, draft)
