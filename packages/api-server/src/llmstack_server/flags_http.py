"""Flags of `llmstack serve` about connections, browsers, logs, limits and what answers carry."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from llmstack_server.flag_types import at_least, count, seconds

Add = Callable[..., argparse.Action]


def texts(text: str) -> list[str]:
    """One text, or a JSON array of them as vLLM takes it: `a` and `["a", "b"]`."""
    if not text.startswith("["):
        return [text]
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"'{text[:64]}' is no JSON: {error}") from None
    if not all(isinstance(entry, str) for entry in parsed):
        raise argparse.ArgumentTypeError(f"'{text[:64]}' is no JSON array of strings")
    return list(parsed)


def file_mode(text: str) -> int:
    """Permission bits in octal."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise argparse.ArgumentTypeError(f"'{text[:16]}' is not a file mode such as 600 or 660")
    return mode


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of this module."""
    _add_connection_arguments(parser.add_argument_group("connections").add_argument)
    _add_tls_arguments(parser.add_argument_group("TLS").add_argument)
    _add_browser_arguments(parser.add_argument_group("browsers and proxies").add_argument)
    _add_log_arguments(parser.add_argument_group("logs").add_argument)
    _add_limit_arguments(parser.add_argument_group("limits").add_argument)
    _add_answer_arguments(parser.add_argument_group("answers").add_argument)


def _add_connection_arguments(add: Add) -> None:
    add("--uds", metavar="PATH", help="listen on a unix socket in place of a port; control routes are open there")
    add("--uds-mode", type=file_mode, default=0o600, metavar="MODE", help="who may connect to it (default: 600)")
    add(
        "--h11-max-incomplete-event-size",
        type=at_least(1024, count),
        default=64 << 10,
        metavar="BYTES",
        help="size of a request's headers at most (default: 64K)",
    )
    add(
        "--h11-max-header-count",
        type=at_least(1),
        default=128,
        metavar="N",
        help="headers of a request at most (default: 128)",
    )
    add(
        "--middleware",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="an ASGI middleware class or an async function of your own; may be given several times",
    )
    add(
        "--extra-routes",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="a function of your own that adds routes to a router; may be given several times",
    )
    add("--enable-request-id-headers", action="store_true", help="accepted; answers always carry X-Request-Id")


def _add_tls_arguments(add: Add) -> None:
    add("--ssl-certfile", metavar="FILE", help="certificate chain in PEM form; serves HTTPS in place of HTTP")
    add("--ssl-keyfile", metavar="FILE", help="its key, unless it is in the same file")
    add("--ssl-ca-certs", metavar="FILE", help="authorities that clients' certificates are checked by")
    add(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="clients' certificates: 0 none, 1 optional, 2 demanded (default: 0)",
    )
    add("--ssl-ciphers", metavar="LIST", help="ciphers of TLS 1.2, in OpenSSL's notation")
    add("--enable-ssl-refresh", action="store_true", help="read certificate files again when they change")


def _add_browser_arguments(add: Add) -> None:
    whats = {"origins": "origins that browsers may call from", "methods": "methods", "headers": "headers"}
    for name, what in whats.items():
        add(
            f"--allowed-{name}",
            nargs="+",
            type=texts,
            action="extend",
            metavar=name.upper()[:-1],
            help=f"{what}, one by one or as a JSON array" + ("" if name == "origins" else ' (default: ["*"])'),
        )
    add("--allow-credentials", action="store_true", help="let browsers send cookies along")
    add("--root-path", metavar="PATH", help="prefix under which a proxy shows this server, such as /llm")
    add("--disable-fastapi-docs", action="store_true", help="no /docs and no /openapi.json")


def _add_log_arguments(add: Add) -> None:
    boolean = argparse.BooleanOptionalAction
    add(
        "--enable-log-requests",
        action=boolean,
        default=False,
        help="log each request's id, prompt, parameters, finish reason and time",
    )
    add("--disable-log-requests", action="store_true", help="accepted; off is the default")
    add("--enable-log-outputs", action=boolean, default=False, help="log the generated text, too")
    add("--max-log-len", type=at_least(0, count), metavar="N", help="characters of a prompt or text in the log")
    add("--log-config-file", metavar="FILE", help="settings of logging (dictConfig) as JSON, in place of our own")


def _add_limit_arguments(add: Add) -> None:
    add(
        "--rate-limit-requests-per-minute",
        type=at_least(1, count),
        metavar="N",
        help="of one API key, or of all clients where there are no keys, in each API process; 429 beyond",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds that a request may take; 504 beyond, 0 for no limit (default: 0)",
    )
    add("--max-concurrent-requests-per-key", type=at_least(1, count), metavar="N", help="the same, at one time")
    add(
        "--max-stored-responses",
        type=at_least(0, count),
        default=1000,
        metavar="N",
        help="responses of /v1/responses kept in memory, 0 for none (default: 1000)",
    )
    add(
        "--max-stored-response-bytes",
        type=at_least(1, count),
        default=64 << 20,
        metavar="BYTES",
        help="size of all of them together (default: 64M)",
    )


def _add_answer_arguments(add: Add) -> None:
    boolean = argparse.BooleanOptionalAction
    add(
        "--enable-force-include-usage",
        action=boolean,
        default=False,
        help="end every stream with its usage, asked for or not",
    )
    add(
        "--return-tokens-as-token-ids",
        action=boolean,
        default=False,
        help="show tokens of log-probabilities as token_id:N",
    )
    add(
        "--stream-interval",
        type=at_least(1),
        default=1,
        metavar="N",
        help="tokens between two chunks of a stream, after the first (default: 1)",
    )
    add("--enable-tokenizer-info-endpoint", action="store_true", help="open GET /tokenizer_info")
