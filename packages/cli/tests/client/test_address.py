"""Addresses of servers as users write them."""

from __future__ import annotations

import pytest

from llmstack_command.client.address import Address
from llmstack_command.errors import ApiError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://[::1]:9000/", "http://[::1]:9000/v1"),
        ("https://api.example.org/llm/v1", "https://api.example.org:443/llm/v1"),
        ("http://example.org", "http://example.org:80/v1"),
    ],
)
def test_an_address_has_a_port_and_a_path(url: str, shown: str):
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x/", "http://", "http://x:port", "http://x/v1?a=b", "http://[::1"]
)
def test_what_is_no_url_is_named(url: str):
    with pytest.raises(ApiError, match="--url"):
        Address.parse(url)
