"""Batch objects of the API: the request that makes one, and its states."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from llmstack_llm import request_errors
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import at_most

COMPLETION_WINDOW_S = 24 * 3600
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 2_592_000


class ExpiresAfter(BaseModel):
    """When a file is removed."""

    model_config = ConfigDict(strict=True, extra="allow")

    anchor: str | None = None
    seconds: int | None = None


class BatchRequestBody(BaseModel):
    """Fields of `POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="allow")

    input_file_id: str | None = None
    endpoint: str | None = Field(None, description="the route of all its requests")
    completion_window: str | None = Field(None, description="24h")
    metadata: Annotated[dict[str, str] | None, at_most(MAX_METADATA, "metadata")] = None
    output_expires_after: ExpiresAfter | None = None


def new_batch(fields: BatchRequestBody, input_file_id: str) -> dict[str, object]:
    """The object of a new batch."""
    now = int(time.time())
    expires = fields.output_expires_after
    return {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": fields.endpoint,
        "model": None,
        "errors": None,
        "input_file_id": input_file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "in_progress_at": None,
        "expires_at": now + COMPLETION_WINDOW_S,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": fields.metadata,
        "output_expires_after": None if expires is None else {"anchor": "created_at", "seconds": expires.seconds},
    }


def check_batch_fields(fields: BatchRequestBody, endpoints: Sequence[str]) -> str:
    """Checks all fields; returns the id of the input file. Batches may name these endpoints.

    Raises:
        InvalidRequestError: A field is missing or has an invalid value.
    """
    for name in ("input_file_id", "endpoint", "completion_window"):
        if getattr(fields, name) is None:
            raise missing_parameter(name)
    if fields.endpoint not in endpoints:
        raise request_errors.invalid_value("endpoint", f"expected one of {', '.join(endpoints)}")
    if fields.completion_window != "24h":
        raise request_errors.invalid_value("completion_window", "expected '24h'")
    _check_metadata(fields.metadata or {})
    if fields.output_expires_after is not None:
        expires = fields.output_expires_after
        check_lifetime("output_expires_after", expires.anchor, expires.seconds)
    return fields.input_file_id or ""


def check_lifetime(param: str, anchor: str | None, seconds: int | None) -> int:
    """The seconds that a file is kept, from one hour to 30 days; raises InvalidRequestError."""
    if anchor != "created_at":
        raise request_errors.invalid_value(f"{param}.anchor", "expected 'created_at'")
    if seconds is None:
        raise missing_parameter(f"{param}.seconds")
    if seconds < MIN_LIFETIME_S:
        raise request_errors.below_min(f"{param}.seconds", MIN_LIFETIME_S, seconds, is_integer=True)
    if seconds > MAX_LIFETIME_S:
        raise request_errors.above_max(f"{param}.seconds", MAX_LIFETIME_S, seconds, is_integer=True)
    return seconds


def error_list(errors: list[dict[str, object]]) -> dict[str, object]:
    """The `errors` of a batch that failed."""
    return {"object": "list", "data": errors}


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise request_errors.too_many_properties("metadata", MAX_METADATA, len(metadata))
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise request_errors.string_too_long("metadata", MAX_METADATA_KEY_CHARS, len(key))
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise request_errors.string_too_long(f"metadata.{key}", MAX_METADATA_VALUE_CHARS, len(value))
