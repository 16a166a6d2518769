"""Client of a request: the tenant of its API key, and whether it is an operator."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from llmstack_server.options.config import ServeConfig
from llmstack_server.options.secret import tenant_ids
from llmstack_server.web.errors import HTTPError, operator_key_required


@dataclass(frozen=True, slots=True)
class Client:
    """One API key, or all clients of a server without keys.

    Attributes:
        tenant: Opaque id of the key; empty without keys.
        salt: The prefix of all its salts of the prefix cache. Those of two tenants have the same length, so that
            no `cache_salt` makes them equal; empty where all share the cache.
        is_operator: Whether it sees and controls the whole server.
        is_batch: Whether this is a request of a batch, for which no client waits.
        models: The models that it may use, of a server with several; None for all of them.
    """

    tenant: str = ""
    salt: str = ""
    is_operator: bool = False
    is_batch: bool = False
    models: frozenset[str] | None = None


EVERYONE = Client(is_operator=True)
NO_CLIENT = Client()
"""A client that has shown no key, on a path that needs none."""

current_client: ContextVar[Client] = ContextVar("client", default=EVERYONE)


def clients_of(config: ServeConfig) -> tuple[Client, ...]:
    """The client of each API key, in the order of the keys."""
    http = config.http
    tenants = tenant_ids(http.api_keys, config.deployment_secret)
    sees_all = http.uds is not None or len(http.api_keys) <= 1
    return tuple(
        Client(
            tenant,
            "" if http.shares_prefix_cache else f"{tenant}:",
            sees_all or key in http.operator_keys,
            models=http.key_to_models.get(key),
        )
        for key, tenant in zip(http.api_keys, tenants, strict=True)
    )


def check_operator() -> None:
    """Returns if the current client is an operator.

    Raises:
        HTTPError: 403, it is not.
    """
    if not current_client.get().is_operator:
        raise HTTPError(operator_key_required())
