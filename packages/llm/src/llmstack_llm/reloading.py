"""Exchange of a front end's engine core for another one while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.engine_clients import check_model
from llmstack_llm.engine_front_end import EngineFrontEnd
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.model.preflight import check_model_runs, find_memory_problem
from llmstack_llm.requests import Adapter
from llmstack_model_files import ModelFilesError
from llmstack_types import EngineReady, InvalidRequestError, LLMStackError, LoRAIdentity

if TYPE_CHECKING:
    from llmstack_engine_client import ReloadingClient
    from llmstack_engine_core import EngineConfig
    from llmstack_llm.protocols import AsyncEngineCoreClient

logger = logging.getLogger(__name__)

# What a front end has read at its start: texts, ids and conversations mean the same before and after.
_TEXT_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_EQUAL_FACTS: Final = ("vocab_size", "eos_token_ids", "bos_token_id", "use", "pooling")
_LASTING: Final = (
    "vocab_size", "is_generative", "is_causal", "embedding_size", "num_labels", "media",
)  # fmt: skip
_MAX_FILE_BYTES: Final = 1 << 28


class ReloadError(LLMStackError):
    """No other engine core can take new requests; the one before serves on. The text says why."""


def reloadable_client(client: AsyncEngineCoreClient) -> ReloadingClient:
    """The client, as one that can exchange its engine core.

    Raises:
        ReloadError: It cannot.
    """
    from llmstack_engine_client import ReloadingClient

    if not isinstance(client, ReloadingClient):
        raise ReloadError("the engine was not started with can_reload")
    return client


async def reload_engine(
    engine: EngineFrontEnd,
    client: ReloadingClient,
    args: EngineArgs | None,
    adapters: Sequence[tuple[str, str]] | None,
    *,
    moves: bool,
) -> tuple[EngineReady, int]:
    """Lets another engine core take new requests, once it is ready; the one before finishes its own.

    Returns what it said then, and how many requests have moved to it.

    `args`: Its options; None keeps the engine core, and changes the adapters alone.
    `moves`: Running requests go on in the other engine core, where that computes the same bits.
    `adapters`: The names and paths of those that requests can name afterwards; None keeps them.

    Raises:
        ReloadError: Nothing has changed; the text says why.
    """
    ready, num_moved = await engine.wait_until_ready(), 0
    await check_can_reload(client)
    with as_reload_errors():
        wanted = None if adapters is None else await asyncio.to_thread(identify_adapters, engine, adapters)
        if args is not None:
            ready, num_moved = await _exchange(engine, client, args, wanted, moves=moves)
        elif wanted is not None:
            for adapter in wanted:
                await engine.adapters.wait_until_loaded(adapter, engine.load_adapter_files)
    if wanted is not None:
        await engine.set_adapters(wanted)
    return ready, num_moved


async def check_can_reload(client: ReloadingClient) -> None:
    """Waits for the end of an engine core that has no request left.

    Raises:
        ReloadError: There are two engine cores, or it sleeps.
    """
    await client.wait_for_end()
    if client.is_reloading:
        raise ReloadError("the reload before is not over: requests still run in the engine core before this one")
    if client.sleep_level:
        raise ReloadError("the engine sleeps")


@contextlib.contextmanager
def as_reload_errors() -> Iterator[None]:
    """Raises errors of the body as a `ReloadError` of one line."""
    try:
        yield
    except (LLMStackError, ModelFilesError, OSError, ValueError) as error:
        raise ReloadError(" ".join(str(error).split()) or type(error).__name__) from error


async def _exchange(
    engine: EngineFrontEnd,
    client: ReloadingClient,
    args: EngineArgs,
    wanted: Sequence[Adapter] | None,
    *,
    moves: bool,
) -> tuple[EngineReady, int]:
    model_config, config, problem = await plan_reload(engine, client, args)
    if problem and moves:
        raise ReloadError(f"running requests cannot move: {problem}; let them finish")

    needed = needed_adapters(engine, wanted)
    check = ready_check(facts_now(engine), model_config)

    def check_exchange(started: EngineReady) -> None:
        check(started)
        check_longest(engine, started)

    if problem:
        if config.hosts is not None:
            raise ReloadError(f"{problem}; with engine cores on other machines there has to be room for both")
        if config.model.max_model_len < facts_now(engine).max_model_len:  # known before the engine core is touched
            raise ReloadError(f"{problem}, and requests that wait could be too long for the next engine core")
        logger.warning("new requests wait until the running ones have ended: %s", problem)
        started = await client.exchange(config, needed, check_exchange)
        return engine.follow_reload(model_config, started), 0
    started = await client.prepare(config, needed)
    try:
        check(started)
        if moves:
            check_longest(engine, started)
        num_moved = client.switch(moves=moves)
    except LLMStackError:
        await client.drop()
        raise
    return engine.follow_reload(model_config, started), num_moved


async def plan_reload(
    engine: EngineFrontEnd, client: ReloadingClient, args: EngineArgs
) -> tuple[ModelConfig, EngineConfig, str]:
    """The configuration of the next engine core, and why it cannot start beside the one that serves.

    Raises:
        ReloadError, ModelConfigError, ModelFilesError, EngineArgsError: It cannot replace that one.
    """
    model_config, config, problem = await asyncio.to_thread(_plan, args, engine.model_config)
    if facts_now(engine).device != "cpu":
        problem = "the weights would take the memory of the device twice"
    return model_config, config, problem


def needed_adapters(
    engine: EngineFrontEnd, wanted: Sequence[Adapter] | None
) -> Callable[[], Sequence[tuple[str, str]]]:
    """Identities and paths of the adapters that the next engine core has to have."""
    return lambda: [(one.identity, one.path) for one in (engine.adapters.adapters if wanted is None else wanted)]


def ready_check(before: EngineReady, model_config: ModelConfig) -> Callable[[EngineReady], None]:
    """Raises an `LLMStackError` for an engine core that runs another model, or is of another use."""

    def check(started: EngineReady) -> None:
        check_model(model_config, started)
        _check_ready(before, model_config.use.restrict(started))

    return check


def _plan(args: EngineArgs, before: ModelConfig) -> tuple[ModelConfig, EngineConfig, str]:
    """The configuration of an engine core that can replace the one of this model, and why it cannot start beside it.

    Raises:
        ReloadError: It cannot.
        ModelConfigError, ModelFilesError, EngineArgsError: The model or the options are unusable.
    """
    model_config, config = args.create_engine_config()
    for name in _EQUAL_FACTS:
        ours, theirs = getattr(before, name), getattr(model_config, name)
        if ours != theirs:
            raise ReloadError(f"{name} is {ours}, but {theirs}: another text or use of the model needs a restart")
    if _text_digests(before) != _text_digests(model_config):
        raise ReloadError("the tokenizer or the chat template is another one: that needs a restart")
    check_model_runs(config)
    starts_here = config.hosts is None or config.hosts.num_local > 0
    return model_config, config, find_memory_problem(config) if starts_here else ""


def _check_ready(before: EngineReady, started: EngineReady) -> None:
    for name in _LASTING:
        if getattr(before, name) != getattr(started, name):
            ours, theirs = getattr(before, name), getattr(started, name)
            raise ReloadError(f"{name} is {ours}, but {theirs}: another use of the model needs a restart")


def facts_now(engine: EngineFrontEnd) -> EngineReady:
    """The facts that hold for each engine core, also while one is replaced after a crash.

    Raises:
        ReloadError: There is none.
    """
    if engine.ready is None:
        raise ReloadError("the engine core is not up")
    return engine.ready


def check_longest(engine: EngineFrontEnd, started: EngineReady) -> None:
    """Refuses to move requests that could be too long for the other engine core."""
    before = facts_now(engine)
    if _longest(started) < _longest(before):
        raise ReloadError(
            f"requests cannot go on there: they may have {_longest(before)} tokens, and {_longest(started)} is the "
            "limit of the next engine core; let them finish"
        )


def _longest(ready: EngineReady) -> int:
    return min(ready.max_model_len, ready.num_kv_tokens or ready.num_blocks * ready.block_size)


def _text_digests(config: ModelConfig) -> dict[str, str]:
    """Digests of the files that decide what token ids and conversations mean.

    Raises:
        ReloadError: One is too large to be such a file.
    """
    folders = {config.path} if config.tokenizer_path is None else {config.path, config.tokenizer_path}
    found: dict[str, str] = {}
    for folder in sorted(folders):
        for name in _TEXT_FILES:
            path = Path(folder) / name
            if not path.is_file():
                continue
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ReloadError(f"{name} has more than {_MAX_FILE_BYTES} bytes")
            with path.open("rb") as file:
                found[name] = found.get(name, "") + hashlib.file_digest(file, "blake2b").hexdigest()
    return found


def identify_adapters(engine: EngineFrontEnd, adapters: Sequence[tuple[str, str]]) -> list[Adapter]:
    """The adapters of a set; one that is there with the same content stays as it is.

    Raises:
        InvalidRequestError: One cannot be served.
    """
    found = []
    for name, path in adapters:
        engine.adapters.check(name, path)
        try:
            adapter = engine.adapters.identify(name, path)
        except InvalidRequestError as error:
            raise ReloadError(f"adapter {name}: {error.message}") from error
        known = engine.adapters.find(name)
        is_same = known is not None and known.path == adapter.path and _digest(known) == _digest(adapter)
        found.append(known if known is not None and is_same else adapter)
    return found


def _digest(adapter: Adapter) -> str:
    return LoRAIdentity.parse(adapter.identity).digest
