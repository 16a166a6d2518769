"""Writes docs/errors.md from the table of the server's errors; with --check, says whether it is current."""

from __future__ import annotations

import sys

from generated_page import write_page

from llmstack_server.web.error_table import KINDS, ErrorKind

HEAD = """# Errors

Every error of the API has one shape, on every route and for every cause:

```json
{"error": {"message": "...", "type": "invalid_request_error", "param": "n", "code": "integer_above_max_value"}}
```

- `code` names the cause, and `param` the field at fault, such as `messages[2].content`. Either can be null.
- `message` is a fixed sentence. It contains at most 64 characters of the input. It never contains a path or the text of
  an exception.
- Every response has an `x-request-id`, and the log shows the same id.
- The routes of the Messages API answer in [Anthropic's shape](responses-and-messages.md#messages).

An error after the first streamed byte is the last event of the stream: `data: {"error": {...}}`. No `finish_reason` and
no `[DONE]` follow it.

The official clients retry 408, 429 and every 5xx. A refusal that a retry can pass has `retry-after` and
`retry-after-ms`. An error that a retry would repeat has `x-should-retry: false`.

Checks run in a fixed order, so a request with two faults always gets the same answer. The order is: authentication,
path and method, shutdown, limits of the key, predicted wait, headers, size. JSON, required fields, types, model,
ranges, combinations of fields, tokens and capacity follow.

`tools/make_errors_page.py` writes this page from the table that the server answers with.
"""
COLUMNS = "| status | code | cause | `param` | type | headers |\n|---|---|---|---|---|---|\n"
SECTIONS = (("The request", range(401, 500)), ("The body", range(400, 401)), ("The server", range(500, 600)))


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, statuses in SECTIONS:
        rows = "".join(_row(kind) for kind in KINDS if kind.status in statuses)
        parts.append(f"\n## {title}\n\n{COLUMNS}{rows}")
    return "".join(parts)


def _row(kind: ErrorKind) -> str:
    code = "null" if kind.code is None else f"`{kind.code}`"
    fixed = [f"`{name}: {value}`" for name, value in kind.headers.items()]
    headers = ", ".join([*fixed, *(f"`{name}`" for name in kind.varying_headers)])
    return f"| {kind.status} | {code} | {kind.cause} | {kind.param or 'null'} | `{kind.type}` | {headers} |\n"


if __name__ == "__main__":
    sys.exit(write_page("errors.md", page()))
