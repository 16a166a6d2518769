"""The header of a step log: the configuration and the versions of the packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import Any, Final

from llmstack_core_scheduler import SchedulerConfig
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.packing import pack, unpack
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types.plain_data import from_plain, to_plain

MARKER_SIZE: Final = 16


def make_marker() -> bytes:
    """Random bytes for the header of a log with snapshots."""
    return token_bytes(MARKER_SIZE)


@dataclass(frozen=True, slots=True)
class LogHeader:
    """Everything but the events that decisions depend on, as plain data: another version may read it differently.

    Attributes:
        scheduler: The fields of `SchedulerConfig`.
        cache: The fields of `CacheConfig`.
        versions: Distribution name to version, of the packages that made the log.
        marker: Random bytes that begin each snapshot, so that a search finds them; no client knows them. Empty in a
            log without snapshots.
        numerics: What the bits of its results depend on: `numeric_contract`, an id, and the `backends` of the model
            runner. Empty where it is not known. No decision depends on it.
    """

    scheduler: dict[str, Any]
    cache: dict[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    marker: bytes = b""
    numerics: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        versions: Mapping[str, str],
        marker: bytes = b"",
        numerics: Mapping[str, object] | None = None,
    ) -> LogHeader:
        """The header of a run under these configurations."""
        return cls(to_plain(scheduler), to_plain(cache), dict(versions), marker, dict(numerics or {}))

    @property
    def made_by(self) -> str:
        """The packages that made the log, with their versions."""
        names = [f"{name} {version}" for name, version in sorted(self.versions.items())]
        return ", ".join(names) or "packages that it does not name"

    def configs(self) -> tuple[SchedulerConfig, CacheConfig]:
        """The configurations as these packages know them.

        Raises:
            StepLogError: They do not: a field is unknown, or out of range.
        """
        try:
            return from_plain(SchedulerConfig, self.scheduler), from_plain(CacheConfig, self.cache)
        except ValueError as error:
            raise StepLogError(f"its configuration is not one of these packages: {error}") from error

    def build_scheduler(self) -> Scheduler:
        """A scheduler over an empty cache, as it was when the run began.

        Raises:
            StepLogError: These packages cannot build it.
        """
        scheduler, cache = self.configs()
        try:
            return build_scheduler(scheduler, cache)
        except ValueError as error:
            raise StepLogError(f"its control plane cannot be built: {error}") from error

    def pack(self) -> bytes:
        """The header as one msgpack map."""
        named = {"scheduler": self.scheduler, "cache": self.cache, "versions": dict(self.versions)}
        others = {"marker": self.marker, "numerics": dict(self.numerics)}
        return pack(named | {name: value for name, value in others.items() if value})

    @classmethod
    def unpack(cls, packed: bytes) -> LogHeader:
        """The inverse of `pack`.

        Raises:
            StepLogError: It is no header.
        """
        try:
            named = unpack(packed, dict)
            header = cls(
                named["scheduler"], named["cache"], named["versions"], named.get("marker", b""),
                named.get("numerics", {}),
            )  # fmt: skip
        except (StepLogError, KeyError) as error:
            raise StepLogError("its header cannot be read") from error
        maps = (header.scheduler, header.cache, header.versions, header.numerics)
        are_kinds = all(isinstance(part, dict) for part in maps) and isinstance(header.marker, bytes)
        if not are_kinds or len(header.marker) not in (0, MARKER_SIZE):
            raise StepLogError("its header cannot be read")
        return header
