"""`llmstack serve --node-rank R` on a machine that hosts ranks of a model."""

from __future__ import annotations

import importlib
import logging

from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.launcher import resolve_engine_args, start_error
from llmstack_types import LLMStackError

logger = logging.getLogger(__name__)

# Found by name: the package is no dependency of the server.
_AGENT = "llmstack_parallel.hosts.agent"


def run_node(config: ServeConfig) -> int:
    """Hosts ranks until a signal, or the end of the machine that answers HTTP (exit code 0).

    Raises:
        ServeError: The model cannot run here, or the first machine refuses this one or is not there.
    """
    from llmstack_llm.model.preflight import check_model_runs

    engine = config.engine
    try:
        _, engine_config = resolve_engine_args(config).create_engine_config()
        check_model_runs(engine_config)
        agent = importlib.import_module(_AGENT)
        logger.info("machine %d of %d joins %s", engine.node_rank, engine.nnodes, engine.master_addr)
        code: int = agent.run_node(engine_config.model, engine_config.start_timeout_s)
    except ImportError as error:
        raise ServeError("--nnodes: pip install llmstack-parallel") from error
    except (LLMStackError, OSError) as error:
        raise start_error(error) from error
    return code
