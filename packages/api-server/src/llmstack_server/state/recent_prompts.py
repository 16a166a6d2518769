"""The last prompts of an API process, where explanations may show their text."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final
from urllib.parse import quote, unquote

from llmstack_llm import RequestObserver, SubmittedRequest
from llmstack_server.state.peers import Peers
from llmstack_server.state.shared_table import SharedTable
from llmstack_types.json_values import JSONObject

TOPIC: Final = "parting"
MAX_PROMPTS: Final = 1024
# Of all prompts, at 4 bytes each, and of one: what comes later is not compared.
MAX_TOKENS: Final = 1 << 20
MAX_PROMPT_TOKENS: Final = 1 << 16
# Tokens before the one where prompts part, which are the same in both.
NUM_BEFORE: Final = 8
MAX_ID_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class _Prompt:
    request_id: str
    owner: tuple[str, str, str]  # tenant, and what else prefixes are not shared over: salt and adapter
    token_ids: array[int]


class RecentPrompts(RequestObserver):
    """Follows the requests of this process, and asks the other processes for theirs."""

    def __init__(self) -> None:
        self._prompts: SharedTable[_Prompt] = SharedTable(MAX_PROMPTS, MAX_TOKENS)
        self._peers: Peers | None = None

    def share(self, peers: Peers | None) -> None:
        """Answers the other API processes, and asks them."""
        self._peers = peers
        if peers is not None:
            peers.add_topic(TOPIC, self._answer)

    def on_submitted(self, request: SubmittedRequest) -> None:
        """Keeps the prompt, in place of old ones of the tenant with the most where there is no room."""
        owner = (request.tenant, request.cache_salt, request.lora_name)
        token_ids = array("I", request.prompt_token_ids[:MAX_PROMPT_TOKENS])
        kept = _Prompt(request.request_id, owner, token_ids)
        self._prompts.put(request.request_id, request.tenant, kept, len(token_ids))

    async def parting(self, request_id: str, tenant: str) -> JSONObject | None:
        """The place where the prompt of a request differs from the most similar one before it, both of this tenant.

        None where the request is not kept, or of another tenant, or no prompt of the process that served it begins
        like its own.
        """
        found = await self._parting(request_id, tenant)
        if found is not None or self._peers is None or len(request_id) > MAX_ID_LENGTH:
            return found
        answers = await self._peers.ask(f"{TOPIC} {quote(request_id, safe='')} {quote(tenant, safe='')}")
        return next((answer for answer in answers if isinstance(answer, dict)), None)

    async def _answer(self, question: str) -> JSONObject | None:
        request_id, _, tenant = question.partition(" ")
        return await self._parting(unquote(request_id), unquote(tenant))

    async def _parting(self, request_id: str, tenant: str) -> JSONObject | None:
        own = self._prompts.get(request_id)
        if own is None or own.owner[0] != tenant:
            return None
        earlier = takewhile(lambda one: one is not own, self._prompts.of(tenant))
        others = [one for one in earlier if one.owner == own.owner]
        return await asyncio.to_thread(_compare, own, others)


def _compare(own: _Prompt, others: Sequence[_Prompt]) -> JSONObject | None:
    best, num_best = None, 0
    for other in others:
        num_common = _num_common(own.token_ids, other.token_ids)
        if num_common and num_common >= num_best:
            best, num_best = other, num_common
    if best is None:
        return None
    return {
        "at": num_best,
        "other": best.request_id,
        "before": own.token_ids[max(0, num_best - NUM_BEFORE) : num_best].tolist(),
        "own_token": _token_at(own, num_best),
        "other_token": _token_at(best, num_best),
    }


def _num_common(ones: array[int], others: array[int]) -> int:
    """Tokens at the start that are the same; slices are compared in native code, so a million take a millisecond."""
    least, most = 0, min(len(ones), len(others))
    while least < most:
        middle = (least + most + 1) // 2
        if ones[least:middle] == others[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _token_at(prompt: _Prompt, at: int) -> int | None:
    return prompt.token_ids[at] if at < len(prompt.token_ids) else None
