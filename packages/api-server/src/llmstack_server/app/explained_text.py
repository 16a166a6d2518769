"""Texts of an explanation: where a prompt differs from one before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from llmstack_server.state.recent_prompts import RecentPrompts
from llmstack_server.state.server_state import ServerState
from llmstack_types import EngineReady, InvalidRequestError, StepRecording

if TYPE_CHECKING:
    from llmstack_insight.explain import Explanation

MAX_CHARACTERS = 80
_NUMBER: Final = re.compile(r"^\d+_")


def recent_prompts(state: ServerState) -> RecentPrompts | None:
    """Follows requests from the time when the server is ready; None where no text may be shown."""
    if not state.config.observability.explains_text:
        return None
    prompts = RecentPrompts()
    prompts.share(state.peers)
    state.at_ready.append(lambda: state.engine.add_observer(prompts))
    return prompts


async def add_text(
    found: Explanation, log: StepRecording, ready: EngineReady, prompts: RecentPrompts, tenant: str, state: ServerState
) -> None:
    """Adds where the match with the prefix cache ended; to operators, too, of their own requests alone.

    Nothing is added where the cache held all that it can hold, or where the first block differs from all earlier ones.
    """
    from llmstack_insight.explain import add_lost_block, insert_on_prefix  # late: few requests need it

    # A completion has a number before the id of its prompt.
    names = dict.fromkeys((found.request_id, _NUMBER.sub("", found.request_id)))
    partings = [await prompts.parting(name, tenant) for name in names]
    parting = next((one for one in partings if one is not None), None)
    num_prompt, num_cached = found.facts.get("prompt_tokens"), found.facts.get("cached_tokens", 0)
    if parting is None or num_prompt is None:
        return
    num_alike, size = parting["at"], ready.block_size
    if num_alike < size or num_cached >= (num_prompt - 1) // size * size:
        return
    if num_alike // size * size > num_cached:
        add_lost_block(
            found, log, (parting["other"], num_alike), ready.block_size, lambda name: log.tenants.get(name) == tenant
        )
        return
    sentence = await _parting_text(found.facts, parting, state)
    if sentence is not None:
        insert_on_prefix(found, sentence)


async def _parting_text(facts: dict[str, Any], parting: dict[str, Any], state: ServerState) -> str | None:
    async def text(token_ids: Sequence[int]) -> str:
        return (await state.engine.detokenize(token_ids))[-MAX_CHARACTERS:]

    async def shown(whose: str) -> str:
        token_id = parting[f"{whose}_token"]
        if token_id is None:
            return "its end"
        facts[f"{whose}_token"], facts[f"{whose}_text"] = token_id, await text([token_id])
        return f"token {token_id}, {facts[f'{whose}_text']!r}"

    try:
        before = await text(parting["before"])
    except InvalidRequestError:  # the server has no tokenizer, so there is no text
        return None
    other = parting["other"]
    facts.update(parts_at=parting["at"], parted_from=other, text_before=before)
    return (
        f"Its prompt parts from that of {other} at token {parting['at']}. "
        f"After {before!r} it has {await shown('own')}, and {other} has {await shown('other')}."
    )
