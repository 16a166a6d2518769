"""Pages of the input items of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmstack_llm import request_errors
from llmstack_server.apis.responses.store import StoredItem, decode
from llmstack_types import InvalidRequestError

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The parameters of a page; `after` is the id of the last item of the previous page."""

    limit: int = DEFAULT_LIMIT
    is_ascending: bool = False
    after: str | None = None


def parse_list_query(query: Mapping[str, str]) -> ListQuery:
    """The parameters from the query of a URL.

    Raises:
        InvalidRequestError: A parameter is invalid; the error names it.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise request_errors.invalid_value("order", "expected 'asc' or 'desc'")
    limit = parse_count("limit", query.get("limit", str(DEFAULT_LIMIT)))
    if limit > MAX_LIMIT:
        raise request_errors.above_max("limit", MAX_LIMIT, limit, is_integer=True)
    if limit < 1:
        raise request_errors.below_min("limit", 1, limit, is_integer=True)
    return ListQuery(limit, order == "asc", query.get("after"))


def parse_count(param: str, text: str) -> int:
    """A whole number of a URL's query; raises InvalidRequestError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise request_errors.invalid_value(param, "expected a whole number")
    return int(text)


def item_page(items: Sequence[StoredItem], query: ListQuery) -> dict[str, object]:
    """One page of the items, as the `list` object of the API.

    Raises:
        InvalidRequestError: There is no item `after`.
    """
    ordered = items if query.is_ascending else items[::-1]
    start = 0
    if query.after is not None:
        found = next((index for index, item in enumerate(ordered) if item.id == query.after), None)
        if found is None:
            raise InvalidRequestError("There is no item with this id.", param="after", code="not_found")
        start = found + 1
    page = ordered[start : start + query.limit]
    return {
        "object": "list",
        "data": [decode(item) for item in page],
        "first_id": page[0].id if page else "",
        "last_id": page[-1].id if page else "",
        "has_more": start + query.limit < len(ordered),
    }
