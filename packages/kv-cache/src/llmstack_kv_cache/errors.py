"""Errors of the package; running out of blocks is none of them, it is an answer."""

from __future__ import annotations


def shown(request_id: object) -> str:
    """An id as messages have it: at most 64 characters; an id of another type than text is allowed in them."""
    return repr(str(request_id)[:64])


class KVCacheError(Exception):
    """Base of the errors that this package raises on purpose."""


class KVCacheIntegrityError(KVCacheError):
    """The cache's own books do not agree; the text says where."""


class UnknownRequestError(KVCacheError, KeyError):
    """A request that holds no blocks was named where one that does is needed."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request_id {shown(self.request_id)} holds no blocks"


class DuplicateRequestError(KVCacheError, ValueError):
    """A request that holds blocks was named where a new one is needed."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request_id {shown(self.request_id)} holds blocks already"
