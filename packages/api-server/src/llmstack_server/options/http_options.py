"""Options of HTTP by theme: encryption, origins, request logs, limits and answers."""

from __future__ import annotations

from collections.abc import Iterator

from llmstack_llm.options.option import OptionGroup, positional_group
from llmstack_llm.options.problem import Problem
from llmstack_types.options import option


def check_certificate_requirement(value: int) -> int:
    """0, 1 or 2, as in `ssl.VerifyMode`."""
    if value not in (0, 1, 2):
        raise ValueError(f"invalid value {value}; choose from 0, 1, 2")
    return value


@positional_group
class TLSConfig(OptionGroup):
    """How connections are encrypted; they are not without `certfile`."""

    title = "TLS"

    certfile: str | None = option(
        None, flag="--ssl-certfile", metavar="FILE", help="certificate chain in PEM form; serves HTTPS in place of HTTP"
    )
    keyfile: str | None = option(
        None, flag="--ssl-keyfile", metavar="FILE", help="private key of the certificate, unless in the same file"
    )
    ca_certs: str | None = option(
        None, flag="--ssl-ca-certs", metavar="FILE", help="authorities that client certificates are verified with"
    )
    cert_reqs: int = option(
        0,
        flag="--ssl-cert-reqs",
        check=check_certificate_requirement,
        metavar="{0,1,2}",
        help="client certificates: 0 ignored, 1 optional, 2 required",
    )
    ciphers: str | None = option(
        None, flag="--ssl-ciphers", metavar="LIST", help="ciphers of TLS 1.2 in OpenSSL's notation"
    )
    is_refreshed: bool = option(False, flag="--enable-ssl-refresh", help="reload certificate files when they change")

    def conflicts(self) -> Iterator[Problem]:
        """Adds options that need a certificate, and client certificates that nothing verifies."""
        yield from super().conflicts()
        if self.certfile is None:
            for name in ("keyfile", "ca_certs", "cert_reqs", "ciphers", "is_refreshed"):
                if getattr(self, name):
                    yield Problem(f"{{{name}}} needs {{certfile}}")
        elif self.cert_reqs and self.ca_certs is None:
            yield Problem("{cert_reqs} needs {ca_certs}, which client certificates are verified with")


@positional_group
class CORSConfig(OptionGroup):
    """Which pages of other origins may call from a browser; no origins means none."""

    title = "Browsers and proxies"

    origins: tuple[str, ...] = option(
        (),
        flag="--allowed-origins",
        metavar="ORIGIN",
        help="origins that browsers may call from, one by one or as a JSON array",
    )
    methods: tuple[str, ...] = option(
        ("*",), flag="--allowed-methods", metavar="METHOD", help="methods that browsers may use from other origins"
    )
    headers: tuple[str, ...] = option(
        ("*",), flag="--allowed-headers", metavar="HEADER", help="headers that browsers may send from other origins"
    )
    allows_credentials: bool = option(
        False, flag="--allow-credentials", help="let browsers send cookies from other origins"
    )
    hosts: tuple[str, ...] = option(
        (),
        flag="--allowed-hosts",
        metavar="NAME",
        help="further names for the Host header of a server without API keys on a loopback address, such as the name "
        "that a proxy passes on; one by one or as a JSON array, and * for any",
    )


@positional_group
class RequestLogConfig(OptionGroup):
    """Options of the log lines for each request."""

    title = "Logs"

    logs_requests: bool = option(
        False,
        flag="--enable-log-requests",
        help="log the id, prompt, parameters, finish reason and time of each request",
    )
    logs_outputs: bool = option(False, flag="--enable-log-outputs", help="log the generated text as well")
    max_chars: int | None = option(
        None,
        flag="--max-log-len",
        at_least=0,
        suffixes=True,
        help="maximum characters of a prompt or an output in the log (default: no limit)",
    )
    is_disabled: bool = option(
        False, flag="--disable-log-requests", help="accepted; requests are not logged by default"
    )

    def conflicts(self) -> Iterator[Problem]:
        """Adds logs that are both wanted and not."""
        yield from super().conflicts()
        if self.logs_requests and self.is_disabled:
            yield Problem("{logs_requests} and {is_disabled} contradict each other; give one of them")
        if self.logs_outputs and not self.logs_requests:
            yield Problem("{logs_outputs} needs {logs_requests}")


@positional_group
class RateLimits(OptionGroup):
    """Limits of one API key; None is no limit. Without keys all clients count as one."""

    title = "Limits"

    max_requests_per_minute: int | None = option(
        None,
        flag="--rate-limit-requests-per-minute",
        at_least=1,
        suffixes=True,
        help="requests per minute of one API key, or of all clients without keys, in each API process; further ones "
        "are answered with 429 (default: no limit)",
    )
    max_concurrent_requests: int | None = option(
        None,
        flag="--max-concurrent-requests-per-key",
        at_least=1,
        suffixes=True,
        help="concurrent requests of one API key, or of all clients without keys, in each API process; further ones "
        "are answered with 429 (default: no limit)",
    )


@positional_group
class ResponseStoreConfig(OptionGroup):
    """The limit of kept responses of `/v1/responses`; none are kept where `max_responses` is 0."""

    title = "Limits"

    max_responses: int = option(
        1000,
        flag="--max-stored-responses",
        at_least=0,
        suffixes=True,
        help="maximum responses of /v1/responses kept; 0 keeps none",
    )
    max_bytes: int = option(
        64 << 20,
        flag="--max-stored-response-bytes",
        at_least=1,
        suffixes=True,
        metavar="BYTES",
        help="maximum size of all of them together (default: 64M)",
    )
    max_age_s: float | None = option(
        2592000.0,
        flag="--max-stored-response-age",
        at_least=0,
        aliases={0: None, "0": None, "0.0": None},
        metavar="S",
        help="seconds that a response is kept after its end; 0 for no limit (default: 2592000, which is 30 days)",
    )


@positional_group
class BatchConfig(OptionGroup):
    """Limits of the Files and Batches APIs, which need `--state-dir`."""

    title = "Limits"

    max_file_bytes: int = option(
        100 << 20,
        at_least=1,
        suffixes=True,
        metavar="BYTES",
        help="maximum size of a file of /v1/files (default: 100M)",
    )
    max_storage_bytes: int = option(
        1 << 30,
        flag="--max-file-storage-bytes",
        at_least=1,
        suffixes=True,
        metavar="BYTES",
        help="maximum size of all files of one API key, or of all clients without keys (default: 1G)",
    )
    max_concurrency: int = option(
        16,
        flag="--max-batch-concurrency",
        at_least=1,
        suffixes=True,
        help="requests of batches that run at one time in each API process; they wait while others are queued",
    )


@positional_group
class RealtimeConfig(OptionGroup):
    """Limits of the sessions of `/v1/realtime`."""

    title = "Limits"

    max_sessions: int = option(
        32,
        flag="--max-realtime-sessions",
        at_least=1,
        suffixes=True,
        help="open sessions of /v1/realtime in all API processes together; further ones are answered with 503",
    )
    max_sessions_per_key: int = option(
        8,
        flag="--max-realtime-sessions-per-key",
        at_least=1,
        suffixes=True,
        help="those of one API key, or of all clients without keys; further ones are answered with 429",
    )
    idle_timeout_s: float | None = option(
        60.0,
        flag="--realtime-idle-timeout",
        at_least=0,
        aliases={0: None, "0": None, "0.0": None},
        metavar="S",
        help="seconds without a message after which a session ends; 0 for no limit",
    )


@positional_group
class AnswerConfig(OptionGroup):
    """Contents of answers that do not depend on the request."""

    title = "Answers"

    forces_usage: bool = option(
        False, flag="--enable-force-include-usage", help="put the token usage into every chunk of every stream"
    )
    shows_tokens_as_ids: bool = option(
        False, flag="--return-tokens-as-token-ids", help="show the tokens of log-probabilities as token_id:N"
    )
    receipt_key_file: str | None = option(
        None,
        flag="--receipts",
        metavar="KEY_FILE",
        help="sign a receipt for each completion and chat completion with this Ed25519 key of `llmstack receipt-key` "
        "(needs llmstack-server[receipts])",
    )
