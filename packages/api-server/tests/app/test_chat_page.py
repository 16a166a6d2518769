"""`/`: one document that loads nothing, runs nothing but its own script, and holds no key."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state

HTML = {"accept": "text/html,application/xhtml+xml"}


def app_with(**options: object):
    return build_app(ready_state(FakeEngineClient(), HTTPConfig(**options)))


async def test_the_page_is_one_small_document_without_other_addresses():
    answer = await call(app_with(), "GET", "/")
    page = answer.body.decode()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert len(answer.body) < 150_000
    assert not re.search(r"https?://|src=\"", page)
    assert re.findall(r"href=\"([^\"]*)\"", page) == ["data:,", "live", "docs", "metrics"]


LINKS = {"/": ["live", "docs", "metrics"], "/live": ["./", "docs", "metrics"], "/docs": ["./", "live", "metrics"]}


def links_of(page: str) -> list[str]:
    (nav,) = re.findall(r"<nav class=\"pages\".*?</nav>", page)
    return re.findall(r"href=\"([^\"]*)\"", nav)


@pytest.mark.parametrize("path", LINKS)
async def test_the_pages_link_to_one_another_and_to_the_metrics(path: str):
    assert links_of((await call(app_with(), "GET", path)).body.decode()) == LINKS[path]


async def test_a_page_that_is_off_is_not_linked_nor_one_that_needs_a_key_in_a_header():
    without_docs = await call(app_with(has_docs=False), "GET", "/")
    assert links_of(without_docs.body.decode()) == ["live", "metrics"]
    docs = await call(app_with(has_chat_page=False), "GET", "/docs")
    assert links_of(docs.body.decode()) == ["metrics"]
    for is_open, links in ((False, ["live"]), (True, ["live", "metrics"])):
        app = app_with(api_keys=(Secret("secret-key"),), has_open_metrics=is_open)
        assert links_of((await call(app, "GET", "/", headers=HTML)).body.decode()) == links


async def test_the_policy_allows_this_style_and_this_script_and_nothing_else():
    answer = await call(app_with(), "GET", "/")
    page, policy = answer.body.decode(), answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "img-src blob: data:; media-src blob: data:;" in policy
    for name in ("style", "script"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\son[a-z]+=|\sstyle=", page)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Storage", "cookie"):
        assert word not in page


async def test_with_keys_a_browser_gets_the_page_that_asks_for_one_and_others_an_error():
    app = app_with(api_keys=(Secret("secret-key"),))
    page = await call(app, "GET", "/", headers=HTML)
    assert (page.status, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "secret-key" not in page.body.decode()
    plain = await call(app, "GET", "/")
    assert (plain.status, plain.json()["error"]["code"]) == (401, "missing_api_key")
    assert (await call(app, "GET", "/", headers={"authorization": "Bearer secret-key"})).status == 200
    wrong = await call(app, "GET", "/", headers={**HTML, "authorization": "Bearer wrong"})
    assert (wrong.status, wrong.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("headers", [{}, HTML])
async def test_a_flag_takes_the_page_away(headers: dict[str, str]):
    answer = await call(app_with(has_chat_page=False), "GET", "/", headers=headers)
    assert (answer.status, answer.json()["error"]["code"]) == (404, "unknown_url")
    locked = app_with(has_chat_page=False, api_keys=(Secret("secret-key"),))
    assert (await call(locked, "GET", "/", headers=headers)).json()["error"]["code"] == "missing_api_key"
