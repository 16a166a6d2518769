"""Options that open routes which most servers do not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_CONTROL: Final = "--enable-control-routes"
_UPDATES: Final = "--weight-update-dir"
# First folders of paths to options. Control routes are open on a unix socket without theirs.
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/files": ("--state-dir",),
    "/v1/batches": ("--state-dir",),
    "/tokenizer_info": ("--enable-tokenizer-info-endpoint",),
    "/pause": (_CONTROL,),
    "/resume": (_CONTROL,),
    "/is_paused": (_CONTROL,),
    "/log_level": (_CONTROL,),
    "/abort_requests": (_CONTROL,),
    "/reset_prefix_cache": (_CONTROL,),
    "/start_profile": (_CONTROL, "--profiler-config"),
    "/stop_profile": (_CONTROL, "--profiler-config"),
    "/sleep": (_CONTROL, "--enable-sleep-mode"),
    "/wake_up": (_CONTROL, "--enable-sleep-mode"),
    "/is_sleeping": (_CONTROL, "--enable-sleep-mode"),
    "/v1/load_lora_adapter": (_CONTROL, "--lora-root"),
    "/v1/unload_lora_adapter": (_CONTROL, "--lora-root"),
    "/v1/reload": (_CONTROL, "--reload-models"),
    "/init_weight_transfer_engine": (_CONTROL, _UPDATES),
    "/start_weight_update": (_CONTROL, _UPDATES),
    "/update_weights": (_CONTROL, _UPDATES),
    "/finish_weight_update": (_CONTROL, _UPDATES),
    "/update_weights_from_disk": (_CONTROL, _UPDATES),
}

# Options that open their routes on a server with one model alone.
_OF_ONE_MODEL: Final = frozenset({"--state-dir", "--enable-sleep-mode", "--reload-models", _UPDATES})


def advice_on(folder: str, *, has_several_models: bool) -> str:
    """A sentence on the options that open an entry of `OPTIONS`; a server with several models never has some."""
    if has_several_models and not _OF_ONE_MODEL.isdisjoint(OPTIONS[folder]):
        return "A server with several models does not have this route."
    return f"The server has this route with {' and '.join(OPTIONS[folder])}."


def folder_of(path: str) -> str:
    """The entry of `OPTIONS` that a path is, or lies below; empty where there is none."""
    return next((folder for folder in OPTIONS if path == folder or path.startswith(f"{folder}/")), "")
