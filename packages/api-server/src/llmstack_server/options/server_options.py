"""Options of the server as a whole: sources, names, address and access."""

from __future__ import annotations

from collections.abc import Iterator

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_server.options.named_objects import check_names
from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import LogLevel


def check_assumed_devices(text: str) -> str:
    """A number of devices and the memory of each."""
    read_assumed_devices(text)
    return text


def read_assumed_devices(text: str) -> tuple[int, int]:
    """The number of devices, and the bytes of each, of a text such as `8x80GiB`.

    Raises:
        ValueError: It has another form.
    """
    number, _, size = text.lower().partition("x")
    digits = size.removesuffix("b").removesuffix("i").removesuffix("g")
    if not (number.isdecimal() and digits.isdecimal() and 0 < int(number) <= 65_536 and 0 < int(digits) <= 65_536):
        raise ValueError(f"{text[:64]!r} is not a number of devices and their memory, such as 8x80GiB")
    return int(number), int(digits) << 30


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys that a client can send."""
    if not all(keys):
        raise ValueError("a key must not be empty")
    return keys


def read_key(text: str) -> tuple[str, ...]:
    """One key as it is written, also one that begins like JSON."""
    return (text,)


def read_file_mode(text: str) -> int:
    """Permission bits in octal."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise ValueError(f"{text[:16]!r} is not a file mode such as 600 or 660")
    return mode


def check_root_path(text: str) -> str:
    """A path prefix with `/` in front and none behind; empty for none."""
    stripped = text.strip("/")
    return f"/{stripped}" if stripped else ""


@option_group
class NameOptions(OptionGroup):
    """Names of the model in the API."""

    title = "Model"

    served_model_names: tuple[str, ...] = option(
        (),
        flag="--served-model-name",
        metavar="NAME",
        help="names of the model in the API; responses carry the first (default: the model as given)",
    )


@option_group
class HubOptions(OptionGroup):
    """How repositories are downloaded."""

    title = "Repository and tokenizer"

    hf_token: str | None = option(
        None,
        value_without_text="",
        secret=True,
        metavar="TOKEN",
        help="token for private and gated repositories; without a value, the one of HF_TOKEN, which is preferred",
    )
    download_dir: str | None = option(
        None, metavar="DIR", help="cache of repositories (default: that of huggingface-hub)"
    )


@option_group
class SourceOptions(OptionGroup):
    """Sources of the options, and the dry run."""

    title = "Server"

    config: str | None = option(
        None, metavar="FILE", help="read options from a YAML file; the command line and the environment override it"
    )
    models: str | None = option(
        None,
        metavar="FILE",
        help="serve the models of a YAML file, which are loaded when requests name them and share its memory",
    )
    dry_run: bool = option(
        False,
        help="check all options and the model's files, print each option with its source and what is missing, and exit",
    )
    translate: str | None = option(
        None,
        metavar="LINE",
        help="print a line of vllm serve, SGLang's launch_server or llama-server as a command of llmstack, and exit",
    )
    assume_devices: str | None = option(
        None,
        check=check_assumed_devices,
        metavar="NxSIZE",
        help="with --dry-run: devices that the server would run on",
        example="8x80GiB",
    )
    assume_model: bool = option(False, help="with --dry-run: do not look for the model's files")

    def conflicts(self) -> Iterator[Problem]:
        """Adds assumptions of a start that is none."""
        yield from super().conflicts()
        for name in ("assume_devices", "assume_model"):
            if getattr(self, name) and not self.dry_run:
                yield Problem(f"{{{name}}} needs {{dry_run}}")


@option_group
class AccessOptions(OptionGroup):
    """Access to the server."""

    title = "Server"

    api_key: tuple[str, ...] = option(
        (),
        read=read_key,
        check=check_keys,
        secret=True,
        environment=("VLLM_API_KEY",),
        metavar="KEY",
        help="accepted API keys; prefer LLMSTACK_API_KEY or --api-key-file, which no list of processes shows",
    )
    api_key_file: str | None = option(None, metavar="FILE", help="file of accepted API keys, one per line")
    operator_key_file: str | None = option(
        None,
        metavar="FILE",
        help="file of further API keys, one per line, that see all requests in /steps and may use the control routes; "
        "without one, a server with several keys has no operator",
    )
    require_auth: bool = option(False, help="refuse to start without an API key")

    def conflicts(self) -> Iterator[Problem]:
        """Adds a server that requires keys and has none."""
        yield from super().conflicts()
        if self.require_auth and not self.api_key and self.api_key_file is None and self.operator_key_file is None:
            yield Problem("{require_auth} needs {api_key}, {api_key_file} or LLMSTACK_API_KEY")


@option_group
class TenantOptions(OptionGroup):
    """Resources that the clients of one server share."""

    title = "Server"

    shares_prefix_cache: bool = option(
        False,
        flag="--share-prefix-cache",
        help="let all API keys share cached prefixes, for one owner of all keys; by default a key finds its own only",
    )
    state_dir: str | None = option(
        None,
        metavar="DIR",
        help="private folder of one server that keeps stored responses, unfinished ones of the background, resumable "
        "streams, and the secret from which the ids of API keys derive (default: nothing outlives the server)",
    )


@option_group
class ListenOptions(OptionGroup):
    """Addresses of the server, its routes, and its stop."""

    title = "Server"

    host: str = option("127.0.0.1", environment=("VLLM_HOST_IP",), metavar="ADDRESS", help="address to listen on")
    port: int = option(
        8000,
        at_least=0,
        at_most=65535,
        environment=("VLLM_PORT",),
        help="port to listen on; 0 chooses a free one and prints it",
    )
    has_open_metrics: bool = option(False, flag="--open-metrics", help="serve /metrics without an API key")
    shutdown_timeout_s: float = option(
        30.0,
        flag="--shutdown-timeout",
        at_least=0,
        metavar="S",
        help="seconds that running requests may take after SIGTERM; 0 aborts them",
    )
    is_strict_params: bool = option(
        False, flag="--strict-params", help="refuse requests with unknown fields in place of ignoring the fields"
    )
    enable_control_routes: bool = option(False, help="open routes that control the server, such as /reset_prefix_cache")
    has_metrics_aliases: bool = option(
        True, flag="--metrics-aliases", help="export each metric under its vllm: name as well"
    )


@option_group
class ConnectionOptions(OptionGroup):
    """Sockets, sizes of requests, and custom code around the routes."""

    title = "Connections"

    uds: str | None = option(
        None, metavar="PATH", help="listen on a unix socket in place of a port; the control routes are open there"
    )
    uds_mode: int = option(
        0o600, read=read_file_mode, show="{:o}".format, metavar="MODE", help="permissions of the unix socket"
    )
    max_header_bytes: int = option(
        64 << 10,
        flag="--h11-max-incomplete-event-size",
        at_least=1024,
        suffixes=True,
        metavar="BYTES",
        help="maximum size of the headers of a request (default: 64K)",
    )
    max_num_headers: int = option(
        128, flag="--h11-max-header-count", at_least=1, help="maximum number of headers of a request"
    )
    max_body_bytes: int = option(
        4 << 20,
        at_least=1,
        at_most=16 << 20,  # a message to the engine core holds no more
        suffixes=True,
        metavar="BYTES",
        help="maximum size of the body of a request, files apart (default: 4M, at most 16M)",
    )
    max_upload_mb: int = option(
        25, at_least=1, at_most=4096, metavar="MIB", help="maximum size of the sound file of a transcription, in MiB"
    )
    middleware: tuple[str, ...] = option(
        (),
        check=check_names,
        metavar="MODULE:NAME",
        help="custom ASGI middleware: classes, or async functions; the last one is outermost",
    )
    extra_routes: tuple[str, ...] = option(
        (), check=check_names, metavar="MODULE:NAME", help="functions that add routes to a router"
    )


@option_group
class PageOptions(OptionGroup):
    """Pages for browsers, and headers for proxies."""

    title = "Browsers and proxies"

    root_path: str = option("", check=check_root_path, metavar="PATH", help="path prefix behind a proxy, such as /llm")
    has_docs: bool = option(
        True, flag="--disable-fastapi-docs", sets=False, help="serve neither /docs nor /openapi.json"
    )
    has_chat_page: bool = option(
        True, flag="--ui", help="serve pages for people: / to talk to the model, /live to watch it"
    )
    has_tokenizer_info: bool = option(False, flag="--enable-tokenizer-info-endpoint", help="open GET /tokenizer_info")


@option_group
class LogOptions(OptionGroup):
    """Logs of the server."""

    title = "Logs"

    uvicorn_log_level: LogLevel = option("info", help="log level of uvicorn")
    has_access_log: bool = option(
        True, flag="--disable-uvicorn-access-log", sets=False, help="log no line for each HTTP request"
    )
    unlogged_paths: str = option(
        "",
        flag="--disable-access-log-for-endpoints",
        metavar="PATHS",
        help="log no line for HTTP requests to these paths, such as /health,/metrics",
    )
    log_config_file: str | None = option(None, metavar="FILE", help="configure logging from a JSON file (dictConfig)")


@option_group
class TimeLimitOptions(OptionGroup):
    """How long a request may take."""

    title = "Limits"

    request_timeout_s: float | None = option(
        None,
        flag="--request-timeout",
        at_least=0,
        aliases={0: None, "0": None, "0.0": None},
        metavar="S",
        help="seconds that a request may take before it ends with 504; 0 for no limit (default: 0)",
    )
    max_queue_wait_s: float | None = option(
        10.0,
        flag="--max-queue-wait",
        at_least=0,
        aliases={0: None, "0": None, "0.0": None},
        metavar="S",
        help="predicted seconds to the first token beyond which a request that has to wait is answered with 503 at "
        "once; 0 for no limit",
    )
