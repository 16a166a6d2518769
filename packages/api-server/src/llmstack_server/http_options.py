"""Groups of settings of the HTTP side: encryption, origins, logs, limits, and what answers carry."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from llmstack_server.errors import ServeError


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """How connections are encrypted.

    Attributes:
        keyfile: None where `certfile` holds the key too.
        cert_reqs: Of clients: 0 asks for no certificate, 1 checks one that is sent, 2 demands one.
        is_refreshed: Changed files are read again while the server runs.
    """

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None
    is_refreshed: bool = False


@dataclass(frozen=True, slots=True)
class CORSConfig:
    """Which pages of other origins may call from a browser; no origins means none."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allows_credentials: bool = False


@dataclass(frozen=True, slots=True)
class RequestLogConfig:
    """What the log says about each request.

    Attributes:
        max_chars: Characters of a prompt or an output; None shows all.
    """

    logs_requests: bool = False
    logs_outputs: bool = False
    max_chars: int | None = None


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What one API key may ask for; None is no limit. Without keys all clients count as one."""

    max_requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """What answers carry whatever a request says.

    Attributes:
        forces_usage: Every stream ends with its usage.
        shows_tokens_as_ids: Tokens of log-probabilities are `token_id:N`, not their texts.
    """

    forces_usage: bool = False
    shows_tokens_as_ids: bool = False


@dataclass(frozen=True, slots=True)
class ResponseStoreConfig:
    """How much of what `/v1/responses` has answered is kept; no responses are kept where `max_responses` is 0."""

    max_responses: int = 1000
    max_bytes: int = 64 << 20


def given_api_keys(namespace: argparse.Namespace) -> list[str]:
    """The keys of the command line, and those in a file, one per line.

    Raises:
        ServeError: A key is empty, or the file cannot be read or has none.
    """
    keys: list[str] = list(namespace.api_key or ())
    if any(not key for key in keys):
        raise ServeError("--api-key: a key must not be empty", exit_code=2)
    if namespace.api_key_file is None:
        return keys
    try:
        lines = Path(namespace.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ServeError(f"--api-key-file {namespace.api_key_file}: {reason}", exit_code=2) from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ServeError(f"--api-key-file {namespace.api_key_file}: it holds no key", exit_code=2)
    return [*keys, *found]


def tls_config(namespace: argparse.Namespace) -> TLSConfig | None:
    """The settings of encryption; None without `--ssl-certfile`.

    Raises:
        ServeError: A flag that needs a certificate came without one.
    """
    if namespace.ssl_certfile is None:
        for flag in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"):
            if getattr(namespace, flag):
                raise ServeError(f"--{flag.replace('_', '-')} needs --ssl-certfile", exit_code=2)
        return None
    if namespace.ssl_cert_reqs and namespace.ssl_ca_certs is None:
        raise ServeError("--ssl-cert-reqs needs --ssl-ca-certs: what clients' certificates are checked by", exit_code=2)
    return TLSConfig(
        certfile=namespace.ssl_certfile,
        keyfile=namespace.ssl_keyfile,
        ca_certs=namespace.ssl_ca_certs,
        cert_reqs=namespace.ssl_cert_reqs,
        ciphers=namespace.ssl_ciphers,
        is_refreshed=namespace.enable_ssl_refresh,
    )


def cors_config(namespace: argparse.Namespace) -> CORSConfig:
    """Who may call from a browser."""
    return CORSConfig(
        origins=flat(namespace.allowed_origins),
        methods=flat(namespace.allowed_methods) or ("*",),
        headers=flat(namespace.allowed_headers) or ("*",),
        allows_credentials=namespace.allow_credentials,
    )


def request_log_config(namespace: argparse.Namespace) -> RequestLogConfig:
    """What is logged about requests.

    Raises:
        ServeError: Flags that contradict each other.
    """
    if namespace.enable_log_requests and namespace.disable_log_requests:
        raise ServeError("--enable-log-requests and --disable-log-requests contradict each other", exit_code=2)
    if namespace.enable_log_outputs and not namespace.enable_log_requests:
        raise ServeError("--enable-log-outputs needs --enable-log-requests", exit_code=2)
    return RequestLogConfig(namespace.enable_log_requests, namespace.enable_log_outputs, namespace.max_log_len)


def rate_limits(namespace: argparse.Namespace) -> RateLimits:
    """What one key may ask for."""
    return RateLimits(namespace.rate_limit_requests_per_minute, namespace.max_concurrent_requests_per_key)


def response_store_config(namespace: argparse.Namespace) -> ResponseStoreConfig:
    """How much is kept."""
    return ResponseStoreConfig(namespace.max_stored_responses, namespace.max_stored_response_bytes)


def answer_config(namespace: argparse.Namespace) -> AnswerConfig:
    """What answers carry."""
    return AnswerConfig(
        forces_usage=namespace.enable_force_include_usage,
        shows_tokens_as_ids=namespace.return_tokens_as_token_ids,
    )


def root_path(text: str | None) -> str:
    """The path prefix of a proxy, `/` in front and none behind; empty for none."""
    stripped = (text or "").strip("/")
    return f"/{stripped}" if stripped else ""


def flat(lists: list[list[str]] | None) -> tuple[str, ...]:
    """The entries of a flag that was given several times, or as several lists."""
    return tuple(entry for group in lists or () for entry in group)
