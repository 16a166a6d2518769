"""`llmstack serve --models`: a server whose models come and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.event_loop import EarlySignals, loop_factory
from llmstack_server.serving.garbage import start_without_collections
from llmstack_server.serving.launcher import StageTimer, resolve_engine_args, start_error
from llmstack_server.serving.sockets import address_of, listening
from llmstack_server.serving.start_checks import USAGE_EXIT_CODE, weight_problems
from llmstack_server.serving.state_directory import folder_of_model
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_server.options.config import ServedModel, ServedModels
    from llmstack_server.pool.pooled_model import MemoryPlan

logger = logging.getLogger(__name__)


def run_models(config: ServeConfig, models: ServedModels) -> int:
    """Serves until a signal; returns the exit code.

    Raises:
        ServeError: The server could not start.
    """
    timer, signals = StageTimer(), EarlySignals(stops_on_hangup=config.http.tls is None)
    models = with_state(config, models)
    with timer.stage("check models"):
        plans = memory_plans(models)
    with signals.installed(), start_without_collections(), contextlib.ExitStack() as stack:
        with timer.stage("bind socket"):
            listener = stack.enter_context(listening(config.http))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            logger.info("listening on %s", address_of(config.http, listener))
            with timer.stage("import HTTP stack"):
                from llmstack_server.serving.models_process import ModelsProcess
            return runner.run(ModelsProcess(config, models, plans, timer, listener, signals).run())


def with_state(config: ServeConfig, models: ServedModels) -> ServedModels:
    """The models with the secret of the deployment, and a folder each where the server has one.

    Raises:
        ServeError: A folder is not ours alone.
    """
    state_dir, found = config.http.state_dir, []
    for model in models.models:
        folder = None if state_dir is None else folder_of_model(state_dir, model.entry.file_name)
        http = replace(model.config.http, state_dir=folder)
        secret = config.deployment_secret
        found.append(model._replace(config=replace(model.config, http=http, deployment_secret=secret)))
    return models._replace(models=tuple(found))


def memory_plans(models: ServedModels) -> list[MemoryPlan]:
    """The parts of the memory of each model.

    Raises:
        ServeError: A model cannot run, or its memory does not suffice for it; the text has a line for each reason.
    """
    plans, problems = [], list[str]()
    for model in models.models:
        try:
            if found := list(weight_problems(model.config)):
                raise ServeError("\n".join(found))
            plans.append(_memory_plan(model))
        except ServeError as error:
            problems += [f"model {model.entry.name}: {line}" for line in str(error).splitlines()]
    if problems:
        raise ServeError("\n".join(problems), exit_code=USAGE_EXIT_CODE)
    return plans


def _adapter_bytes(config: ServeConfig) -> int:
    """The size of the files of adapters from the start, as many of the largest as are kept in memory."""
    engine, sizes = config.engine, []
    for module in config.adapters.start_modules():
        with contextlib.suppress(OSError):  # the load says what is at fault
            sizes.append(sum(one.stat().st_size for one in os.scandir(module.path) if one.is_file()))
    return sum(sorted(sizes)[-(engine.max_cpu_loras or engine.max_loras) :])


def _memory_plan(model: ServedModel) -> MemoryPlan:
    from llmstack_llm.model.preflight import check_model_runs, least_memory
    from llmstack_model_files import ModelFilesError
    from llmstack_server.pool.pooled_model import MemoryPlan

    try:
        _, engine = resolve_engine_args(model.config).create_engine_config()
        process_bytes, weight_bytes, token_bytes = least_memory(engine)
        process_bytes += _adapter_bytes(model.config)
        given_bytes = model.config.engine.kv_cache_memory_bytes
        left_bytes = model.entry.memory_bytes - process_bytes - weight_bytes
        kv_bytes = left_bytes if given_bytes is None else engine.model.num_engines * given_bytes
        if not engine.model.block_size * token_bytes <= kv_bytes <= left_bytes or left_bytes <= 0:
            shown = [f"{one / 2**20:.0f} MiB" for one in (model.entry.memory_bytes, process_bytes, weight_bytes)]
            raise ServeError(
                f"its memory of {shown[0]} is too little: its processes take about {shown[1]}, its weights about "
                f"{shown[2]} while they are loaded, and the rest is its KV cache"
            )
        check_model_runs(replace(engine, kv_cache_bytes=kv_bytes // engine.model.num_engines))
    except (LLMStackError, ModelFilesError, OSError) as error:
        raise start_error(error) from error
    return MemoryPlan(process_bytes, weight_bytes, kv_bytes)
