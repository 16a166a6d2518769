"""`/docs`: the page and its assets come from this server alone."""

from __future__ import annotations

import gzip
import re

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state


async def test_the_page_names_no_other_machine_and_all_it_names_is_here():
    app = build_app(ready_state(FakeEngineClient()))
    page = await call(app, "GET", "/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "//" not in page.body.decode()
    addresses = re.findall(r'(?:src|href|url)(?:=|: )"([^":]+)"', page.body.decode())
    links, files = ["./", "live", "metrics"], ["docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "openapi.json"]
    assert sorted(addresses) == sorted(links + files)
    for address in addresses:
        assert (await call(app, "GET", f"/{address.removeprefix('./')}")).status == 200


async def test_assets_are_compressed_for_who_takes_that_and_equal_for_all():
    app = build_app(ready_state(FakeEngineClient()))
    for name, media_type in (("swagger-ui-bundle.js", "text/javascript"), ("swagger-ui.css", "text/css")):
        plain = await call(app, "GET", f"/docs/{name}")
        packed = await call(app, "GET", f"/docs/{name}", headers={"accept-encoding": "gzip, br"})
        assert packed.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert gzip.decompress(packed.body) == plain.body
        assert packed.headers["content-type"].startswith(media_type)


async def test_a_flag_takes_page_and_document_away():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(has_docs=False)))
    for path in ("/docs", "/openapi.json", "/docs/swagger-ui.css"):
        answer = await call(app, "GET", path)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_the_document_lists_the_routes():
    document = (await call(build_app(ready_state(FakeEngineClient())), "GET", "/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/health", "/metrics"} <= set(document["paths"])
    assert "/docs" not in document["paths"]
