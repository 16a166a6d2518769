"""TLS contexts from files, read again when the files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path

from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import TLSConfig

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 5.0


def make_tls_context(config: TLSConfig) -> ssl.SSLContext:
    """A context for servers, with TLS 1.2 or newer.

    Raises:
        ServeError: A file cannot be used; the text names it and its flag.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificates(context, config)
    context.verify_mode = ssl.VerifyMode(config.cert_reqs)
    if config.ciphers is not None:
        try:
            context.set_ciphers(config.ciphers)
        except ssl.SSLError:
            raise ServeError(f"--ssl-ciphers {config.ciphers[:64]!r}: no such cipher is known", exit_code=2) from None
    return context


def load_certificates(context: ssl.SSLContext, config: TLSConfig) -> None:
    """Reads the files into `context`; new connections use them.

    Raises:
        ServeError: A file cannot be used; the text names it and its flag.
    """
    flag_to_path = {"--ssl-certfile": config.certfile, "--ssl-keyfile": config.keyfile}
    for flag, path in (flag_to_path | {"--ssl-ca-certs": config.ca_certs}).items():
        if path is not None:
            _check_readable(flag, path)
    try:
        # Without a password OpenSSL asks for one on the terminal, where a server gets no answer.
        context.load_cert_chain(config.certfile or "", config.keyfile, password="")
    except (ssl.SSLError, ValueError):
        named = " and ".join(f"{flag} {path}" for flag, path in flag_to_path.items() if path is not None)
        reason = "not a certificate and its key in PEM form, or the key is encrypted"
        raise ServeError(f"{named}: {reason}", exit_code=2) from None
    if config.ca_certs is not None:
        try:
            context.load_verify_locations(config.ca_certs)
        except ssl.SSLError:
            raise ServeError(f"--ssl-ca-certs {config.ca_certs}: no certificates in PEM form", exit_code=2) from None


def _check_readable(flag: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise ServeError(f"{flag} {path}: {error.strerror}", exit_code=2) from None


async def refresh_certificates(
    context: ssl.SSLContext, config: TLSConfig, interval_s: float = REFRESH_INTERVAL_S
) -> None:
    """Reads the files again whenever one has changed, until cancelled; unusable files change nothing."""
    seen = _fingerprint(config)
    while True:
        await asyncio.sleep(interval_s)
        found = _fingerprint(config)
        if found == seen:
            continue
        seen = found
        reload_certificates(context, config)


def reload_certificates(context: ssl.SSLContext, config: TLSConfig) -> None:
    """Reads the files again, for new connections; unusable files change nothing."""
    try:
        make_tls_context(config)  # tried in a separate context: a wrong key would leave the live one without both
        load_certificates(context, config)
    except ServeError as error:
        logger.warning("the old certificate stays in use: %s", error)
    else:
        logger.info("the certificate was read again from %s", config.certfile)


def _fingerprint(config: TLSConfig) -> list[tuple[int, int, int] | None]:
    found: list[tuple[int, int, int] | None] = []
    for path in filter(None, (config.certfile, config.keyfile, config.ca_certs)):
        try:
            status = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return found
