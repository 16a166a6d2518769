"""Admitted prompts to what the engine makes of them, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from llmstack_server.openai.events import merge
from llmstack_server.openai.protocol import PoolingFields
from llmstack_server.protocols import AdmittedInput, PooledOutput
from llmstack_server.state import ServerState
from llmstack_types import PoolingParams

_NO_NAMES: Mapping[str, str] = {}
MAX_NUM_INPUTS = 2048
"""Of one request, as at OpenAI."""
MAX_NUM_IN_FLIGHT = 256
"""Inputs of one request that the engine holds at once: more would fill its queue, and 256 fill any step."""


async def admit_all(
    state: ServerState,
    prompts: Iterable[tuple[Any, str]],
    params: PoolingParams,
    *,
    add_special_tokens: bool = True,
    param_names: Mapping[str, str] = _NO_NAMES,
) -> list[AdmittedInput]:
    """Tokenizes and checks each prompt, which comes with the name its user has for it.

    `param_names`: Names of the parameters' fields where the user knows them by others.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    admitted = []
    for prompt, param in prompts:
        admit = state.engine.admit_pooling
        options: dict[str, Any] = {"param": param, "param_names": param_names, "add_special_tokens": add_special_tokens}
        admitted.append(await admit(prompt, params, **options))
        await asyncio.sleep(0)  # short texts are tokenized on the event loop, and there may be thousands
    return admitted


async def run_all(
    state: ServerState, inputs: Sequence[AdmittedInput], fields: PoolingFields, request_id: str
) -> AsyncIterator[tuple[int, PooledOutput]]:
    """What each input brings, as it comes, with its index; whoever leaves aborts the rest."""
    encode, priority, cache_salt = state.engine.encode, fields.priority or 0, fields.cache_salt or ""
    for start in range(0, len(inputs), MAX_NUM_IN_FLIGHT):
        streams = [
            encode(one, None, f"{request_id}-{index}", priority=priority, cache_salt=cache_salt)
            for index, one in enumerate(inputs[start : start + MAX_NUM_IN_FLIGHT], start)
        ]
        async for index, output in merge(streams):
            yield start + index, output


def count_tokens(inputs: Sequence[AdmittedInput]) -> int:
    """Prompt tokens of all inputs."""
    return sum(len(one.prompt_token_ids) for one in inputs)
