"""Fetching: what is allowed, what is dialled, and how much is read. No test opens a connection."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_helpers.net import OPEN, PICTURE, PUBLIC, Net, answer

from llmstack_media.fetch.addresses import may_dial
from llmstack_media.fetch.fetcher import Fetcher
from llmstack_media.fetch.policy import FetchPolicy, http_target
from llmstack_media.parts import MediaPart
from llmstack_types import InvalidRequestError


@pytest.fixture
def net() -> Net:
    return Net()


async def refusal(work: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await work
    return caught.value


async def test_the_checked_address_is_dialled_with_the_name_in_host_and_tls(net: Net) -> None:
    net.addresses["pictures.example"] = [PUBLIC, "93.184.216.35"]
    assert await net.fetcher().fetch("https://Pictures.Example./a/b.png?x=1#part") == PICTURE
    assert net.dialled == [(PUBLIC, 443, "pictures.example")]
    assert net.resolved == ["pictures.example"], "once"
    sent = net.transports[0].sent
    assert sent.startswith(b"GET /a/b.png?x=1 HTTP/1.1\r\nHost: pictures.example\r\n")
    assert all(name not in sent.lower() for name in (b"cookie", b"authorization", b"referer"))
    assert net.transports[0].is_aborted


async def test_proxy_variables_are_not_followed(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://10.0.0.1:3128")
    await net.fetcher().fetch("http://pictures.example/a")
    assert net.dialled == [(PUBLIC, 80, None)]


PRIVATE = (
    "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1",
    "::127.0.0.1", "2001:db8::1", "nonsense", "",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
async def test_an_address_that_is_not_public_is_refused_also_beside_a_public_one(net: Net, address: str) -> None:
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        net.addresses["rebind.example"] = addresses
        error = await refusal(net.fetcher().fetch("http://rebind.example/"))
        assert error.code == "media_url_not_allowed"
    assert not net.dialled


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"])
def test_public_addresses_may_be_dialled(address: str) -> None:
    assert may_dial(address, [])


@given(st.ip_addresses(v=4))
def test_a_wrapped_address_is_as_public_as_the_one_in_it(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    wrapped = [f"::ffff:{address}", str(ipaddress.IPv6Address((0x64_FF9B << 96) | number)),
               str(ipaddress.IPv6Address((0x2002 << 112) | (number << 80)))]  # fmt: skip
    assert {may_dial(text, []) for text in wrapped} == {may_dial(str(address), [])}


async def test_a_private_network_is_dialled_only_where_it_is_named(net: Net) -> None:
    net.addresses["store.internal"] = ["10.1.2.3"]
    policy = FetchPolicy(domains=("store.internal",), networks=(ipaddress.ip_network("10.1.0.0/16"),))
    assert await net.fetcher(policy).fetch("http://store.internal/x") == PICTURE
    net.addresses["store.internal"] = ["10.2.2.3"]
    assert (await refusal(net.fetcher(policy).fetch("http://store.internal/x"))).code == "media_url_not_allowed"


@pytest.mark.parametrize(("domain", "host", "is_allowed"), [
    ("a.example", "a.example", True), ("a.example", "b.a.example", False), ("*.a.example", "b.a.example", True),
    ("*.a.example", "a.example", False), ("a.example", "evila.example", False), ("*", "any.example", True),
    ("A.Example", "a.example", True),
])  # fmt: skip
async def test_hosts_are_those_of_the_list(net: Net, domain: str, host: str, is_allowed: bool) -> None:
    fetching = net.fetcher(FetchPolicy(domains=(domain,))).fetch(f"http://{host}/")
    if is_allowed:
        assert await fetching == PICTURE
    else:
        assert (await refusal(fetching)).code == "media_url_not_allowed"
        assert not net.resolved


ODD_URLS = (
    "http://user:password@a.example/", "http://a.example@evil.example/", "http://a.example\\@evil.example/",
    "http://a.example/ x", "http://a.example/\r\nX: y", "http://a.example/\0", "http:///path", "http://:80/", "http://",
    "http://a.example:99999/", "http://a.example:x/", "http://[::1", "http://[fe80::1%25eth0]/", "ftp://a.example/",
    "gopher://a.example/", "//a.example/", "a.example/x.png", "javascript:alert(1)", "http://ü.example/", "",
    "http://a.example/" + "x" * 9000, "file:///etc/passwd", "FILE:///etc/passwd",
)  # fmt: skip


@pytest.mark.parametrize("url", ODD_URLS)
async def test_odd_urls_are_refused_before_anything_is_resolved(net: Net, url: str) -> None:
    error = await refusal(net.fetcher().fetch(url))
    assert error.code == "media_url_not_allowed"
    assert not net.resolved
    assert "passwd" not in error.message
    assert "evil" not in error.message


async def test_by_default_only_data_is_read(net: Net) -> None:
    fetcher = net.fetcher(FetchPolicy())
    assert await fetcher.fetch("data:image/png;base64,AAEC") == b"\0\1\2"
    for url in ("http://a.example/", "https://a.example/", "file:///tmp/x"):
        assert (await refusal(fetcher.fetch(url))).code == "media_url_not_allowed"
    assert not net.resolved


def redirect(to: str, status: str = "302 Found") -> bytes:
    return answer(b"", status, f"Location: {to}\r\n")


async def test_a_redirect_is_checked_again_in_every_respect(net: Net) -> None:
    net.addresses["inner.example"] = ["127.0.0.1"]
    policy = FetchPolicy(domains=("a.example", "inner.example"))
    for to in ("http://inner.example/", "http://127.0.0.1/", "http://evil.example/", "https://a.example/",
               "http://a.example:81/", "file:///etc/passwd", "http://u:p@a.example/",
               "http://a.example/\tx"):  # fmt: skip
        net.answers["a.example/start"] = redirect(to)
        error = await refusal(net.fetcher(policy).fetch("http://a.example/start"))
        assert error.code == "media_url_not_allowed", to
    assert {address for address, _, _ in net.dialled} == {PUBLIC}


async def test_at_most_three_redirects_are_followed_and_none_where_they_are_off(net: Net) -> None:
    for number in range(5):
        net.answers[f"a.example/{number}"] = redirect(f"/{number + 1}", "307 Temporary Redirect")
    net.answers["a.example/5"] = answer()
    assert await net.fetcher().fetch("http://a.example/2") == PICTURE
    assert (await refusal(net.fetcher().fetch("http://a.example/1"))).code == "media_fetch_failed"
    policy = FetchPolicy(domains=("*",), has_redirects=False)
    assert (await refusal(net.fetcher(policy).fetch("http://a.example/4"))).code == "media_fetch_failed"


BODIES: dict[str, tuple[bytes, bytes | str]] = {
    "length": (answer(), PICTURE),
    "to the end": (b"HTTP/1.0 200 OK\r\n\r\n" + PICTURE, PICTURE),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
    "interim": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(), PICTURE),
    "too long by its length": (answer(b"x", length=1001), "image_too_large"),
    "too long by its end": (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1001), "image_too_large"),
    "too long by its chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffff\r\n", "image_too_large"),
    "cut": (answer(b"x", length=10), "media_fetch_failed"),
    "cut in a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", "media_fetch_failed"),
    "bad chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc", "media_fetch_failed"),
    "bad length": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "media_fetch_failed"),
    "compressed": (answer(headers="Content-Encoding: gzip\r\n"), "media_fetch_failed"),
    "no http": (b"SSH-2.0-OpenSSH\r\n\r\n", "media_fetch_failed"),
    "nothing": (b"", "media_fetch_failed"),
    "a line without end": (b"HTTP/1.1 200 OK\r\nX: " + bytes(100_000), "media_fetch_failed"),
    "headers without end": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 9000, "media_fetch_failed"),
    "only interim": (b"HTTP/1.1 100 Continue\r\n\r\n" * 9, "media_fetch_failed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_bodies_in_every_form(net: Net, name: str) -> None:
    sent, expected = BODIES[name]
    net.answers["a.example/"] = sent
    fetching = net.fetcher().fetch("http://a.example/")
    if isinstance(expected, bytes):
        assert await fetching == expected
    else:
        assert (await refusal(fetching)).code == expected


async def test_a_failure_names_status_and_type_and_no_content(net: Net) -> None:
    net.answers["a.example/"] = answer(b"secret", "404 secret", "Content-Type: text/html; secret\r\n")
    error = await refusal(net.fetcher().fetch("http://a.example/"))
    assert error.code == "media_fetch_failed"
    assert "status 404 and type text/html" in error.message
    assert "secret" not in error.message


async def test_a_server_that_waits_ends_with_the_time(net: Net) -> None:
    net.is_open = True
    net.answers["a.example/"] = b"HTTP/1.1 200 OK\r\n"
    policy = FetchPolicy(domains=("*",), timeout_s=0.05)
    error = await refusal(net.fetcher(policy).fetch("http://a.example/"))
    assert error.code == "media_fetch_failed"
    assert "0.05 s" in error.message
    assert net.transports[0].is_aborted


async def test_nothing_that_a_log_could_show_has_the_url_or_content(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    url = "http://secret.example/secret-path?secret-key=1"
    net.answers["secret.example/secret-path?secret-key=1"] = answer(b"secret", "500 secret")
    texts = [repr(MediaPart(url, "id")), repr(http_target(url, OPEN))]
    for one in (url, url.replace("http", "ftp", 1), "data:image/png;base64,secret!!", "file:///secret"):
        error: BaseException | None = await refusal(net.fetcher().fetch(one))
        while error is not None:
            texts.append(f"{error!r} {error}")
            error = error.__cause__
    assert "secret" not in "".join([*texts, caplog.text])


async def test_another_checked_address_is_dialled_where_the_first_is_out_of_reach(net: Net) -> None:
    net.addresses["a.example"] = ["2606:2800:220:1::1", PUBLIC]
    connect = net.connect

    async def reach_one(address: str, port: int, name: str | None) -> Any:
        if address != PUBLIC:
            net.dialled.append((address, port, name))
            await asyncio.sleep(60)
        return await connect(address, port, name)

    policy = FetchPolicy(domains=("*",), timeout_s=0.4)
    assert await Fetcher(policy, resolve=net.resolve, connect=reach_one).fetch("http://a.example/") == PICTURE
    assert net.dialled == [("2606:2800:220:1::1", 80, None), (PUBLIC, 80, None)]


async def test_a_connection_that_fails_is_a_refusal() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return [PUBLIC]

    async def connect(address: str, port: int, name: str | None) -> Any:
        raise ConnectionRefusedError("no")

    error = await refusal(Fetcher(OPEN, resolve=resolve, connect=connect).fetch("http://a.example/"))
    assert error.code == "media_fetch_failed"


ENCODED = base64.b64encode(PICTURE).decode()
DATA_URLS: dict[str, tuple[str, bool]] = {
    "plain": (f"data:image/png;base64,{ENCODED}", True),
    "no type": (f"data:;base64,{ENCODED}", True),
    "another type": (f"data:text/html;base64,{ENCODED}", True),
    "parameters": (f"data:image/png;name=x;base64,{ENCODED}", True),
    "upper case": (f"DATA:image/png;BASE64,{ENCODED}", True),
    "white space": (f"data:image/png;base64, {ENCODED[:9]} \r\n\t{ENCODED[9:]}\n", True),
    "empty": ("data:image/png;base64,", True),
    "without padding": (f"data:image/png;base64,{ENCODED.rstrip('=')}", False),
    "padding inside": ("data:image/png;base64,AA==AA==", False),
    "url-safe": ("data:image/png;base64,-_-_", False),
    "percent": ("data:image/png;base64,AA%3D%3D", False),
    "not ascii": ("data:image/png;base64,ÄÖÜß", False),
    "no base64": ("data:image/png,hello", False),
    "no comma": ("data:image/png;base64" + "A" * 999, False),
    "too long": ("data:;base64," + base64.b64encode(bytes(1001)).decode(), False),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA_URLS)
async def test_base64_is_strict_but_for_white_space(net: Net, name: str) -> None:
    url, is_valid = DATA_URLS[name]
    fetching = net.fetcher().fetch(url)
    if is_valid:
        assert await fetching == (b"" if name == "empty" else PICTURE)
    else:
        error = await refusal(fetching)
        assert error.code in ("invalid_image", "image_too_large", "media_fetch_failed")
        assert url[-8:] not in error.message


async def test_the_size_of_base64_is_checked_before_it_is_decoded(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binascii.a2b_base64", lambda *a, **k: pytest.fail("it is decoded"))
    assert (await refusal(net.fetcher().fetch("data:;base64," + "A" * 4000))).code == "image_too_large"


@given(st.binary(max_size=300))
def test_every_content_is_read_as_it_was_encoded(content: bytes) -> None:
    url = "data:;base64," + base64.b64encode(content).decode()
    assert asyncio.run(Fetcher(OPEN).fetch(url)) == content


@given(st.text(max_size=60))
def test_no_text_is_anything_but_a_refusal(text: str) -> None:
    for begin in ("data:", "http:", "http://", "https://[", "file:", ""):
        net = Net()
        with pytest.raises(InvalidRequestError):
            asyncio.run(net.fetcher(FetchPolicy(domains=("only.example",))).fetch(begin + text))
