"""Finished answers, kept for drafts of later requests."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from llmstack_core_scheduler.protocols import DraftOwner
from llmstack_core_scheduler.suffix_index import SuffixIndex

END: Final = -1
"""Follows each answer that is kept."""


class KeptAnswers:
    """The last answers of each owner. Where room is short, the tenant with the most tokens loses its oldest answer.

    So a tenant with many requests does not push the answers of others out.

    Attributes:
        num_tokens: Tokens of all answers, with an end of each.
    """

    def __init__(self, max_num_answers: int, max_num_tokens: int) -> None:
        """The limits hold over all owners."""
        self.num_tokens = 0
        self._max_num_answers, self._max_num_tokens = max_num_answers, max_num_tokens
        self._num_answers = 0
        self._tenant_to_answers: dict[str, deque[tuple[DraftOwner, tuple[int, ...]]]] = {}  # oldest first
        self._tenant_to_num_tokens: dict[str, int] = {}
        self._owner_to_index: dict[DraftOwner, SuffixIndex] = {}

    def of(self, owner: DraftOwner) -> SuffixIndex | None:
        """The index of an owner's answers; None where none are kept."""
        return self._owner_to_index.get(owner)

    def __iter__(self) -> Iterator[tuple[DraftOwner, tuple[int, ...]]]:
        """Each answer with its owner. Added in this order to an empty store they make an equal one."""
        return itertools.chain.from_iterable(self._tenant_to_answers.values())

    def add(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """Keeps an answer; of a longer one than there is room for, its end."""
        if not self._max_num_answers:
            return
        kept = tuple(token_ids[1 - self._max_num_tokens :])
        self._owner_to_index.setdefault(owner, SuffixIndex()).extend((*kept, END))
        self._tenant_to_answers.setdefault(owner[0], deque()).append((owner, kept))
        self._count(owner[0], 1, len(kept) + 1)
        while self._num_answers > self._max_num_answers or self.num_tokens > self._max_num_tokens:
            self._drop_oldest(max(self._tenant_to_num_tokens, key=self._tenant_to_num_tokens.__getitem__))

    def _drop_oldest(self, tenant: str) -> None:
        owner, token_ids = self._tenant_to_answers[tenant].popleft()
        index = self._owner_to_index[owner]
        index.drop(len(token_ids) + 1)
        if index.start == index.end:
            del self._owner_to_index[owner]
        self._count(tenant, -1, -len(token_ids) - 1)
        if not self._tenant_to_num_tokens[tenant]:
            del self._tenant_to_answers[tenant], self._tenant_to_num_tokens[tenant]

    def _count(self, tenant: str, num_answers: int, num_tokens: int) -> None:
        self._num_answers += num_answers
        self.num_tokens += num_tokens
        self._tenant_to_num_tokens[tenant] = self._tenant_to_num_tokens.get(tenant, 0) + num_tokens
