"""The configuration of transfers between engine cores, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SHARED_MEMORY: Final = "SharedMemoryConnector"
NIXL: Final = "NixlConnector"
PRODUCER: Final = "kv_producer"
CONSUMER: Final = "kv_consumer"
BOTH: Final = "kv_both"
_CONNECTORS: Final = (SHARED_MEMORY, NIXL)
_ROLES: Final = (PRODUCER, CONSUMER, BOTH)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits of exports and imports.

    Attributes:
        max_bytes: The largest size of all exports that are kept at one time.
        max_exports: Their number.
        time_to_live_s: An export that is not imported within it is dropped.
        import_timeout_s: A request whose blocks do not arrive within it is computed.
        side_channel_port: Where an exporter between hosts listens; 0 is a free port.
    """

    max_bytes: int = 1 << 30
    max_exports: int = 256
    time_to_live_s: float = 60.0
    import_timeout_s: float = 5.0
    side_channel_port: int = 0

    def __post_init__(self) -> None:
        for name, most in (
            ("max_bytes", 1 << 40),
            ("max_exports", 4096),
            ("time_to_live_s", 3600.0),
            ("import_timeout_s", 300.0),
        ):
            if not 0 < getattr(self, name) <= most:
                raise ValueError(f"{name} must be above 0 and at most {most}, but is {getattr(self, name)}")
        if not 0 <= self.side_channel_port < 65536:
            raise ValueError(f"side_channel_port must lie in [0, 65535], but is {self.side_channel_port}")


@dataclass(frozen=True, slots=True)
class TransferNetwork:
    """The network between engine cores of several hosts.

    Attributes:
        interface: The network interface that the operator trusts: the blocks themselves are not encrypted.
        key_file: The key file of the cluster; engine cores without it cannot ask for blocks, nor offer them.
    """

    interface: str
    key_file: str


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """Settings of the exchange of KV blocks with other engine cores.

    Attributes:
        kv_connector: The carrier of the blocks: `SharedMemoryConnector`, between engine cores of one host and user, or
            `NixlConnector`, between those of several hosts.
        kv_role: `kv_producer` exports, `kv_consumer` imports, `kv_both` does both.
        kv_load_failure_policy: `recompute`: a prompt whose blocks do not arrive is computed.
        kv_connector_extra_config: The limits.
    """

    kv_connector: str
    kv_role: str = BOTH
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: TransferLimits = field(default_factory=TransferLimits)

    def __post_init__(self) -> None:
        if self.kv_connector not in _CONNECTORS:
            raise ValueError(
                f"kv_connector '{self.kv_connector[:64]}' is not supported; '{SHARED_MEMORY}' carries KV blocks "
                f"between servers of one host, '{NIXL}' between hosts"
            )
        if self.kv_role not in _ROLES:
            raise ValueError(f"kv_role must be one of {', '.join(_ROLES)}, but is '{self.kv_role[:64]}'")
        if self.kv_load_failure_policy != "recompute":
            raise ValueError("kv_load_failure_policy must be 'recompute': a failed import never fails the request")

    @property
    def is_between_hosts(self) -> bool:
        """Whether it needs a `TransferNetwork`."""
        return self.kv_connector == NIXL

    @property
    def can_export(self) -> bool:
        """Whether requests may ask for an export."""
        return self.kv_role != CONSUMER

    @property
    def can_import(self) -> bool:
        """Whether requests may name an export."""
        return self.kv_role != PRODUCER
