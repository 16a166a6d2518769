"""Flags of `llmstack serve` about processes: how many answer HTTP, how many compute, and where they meet."""

from __future__ import annotations

import argparse

from llmstack_server.flag_types import at_least


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of this module."""
    add = parser.add_argument_group("processes").add_argument
    add(
        "--api-server-count",
        "-asc",
        type=at_least(0),
        default=1,
        metavar="N",
        help="processes that answer HTTP on one port; 0 is --headless (default: 1)",
    )
    add("--headless", action="store_true", default=False, help="run engine cores without HTTP (default: False)")
    add(
        "--engine-address",
        nargs="+",
        action="extend",
        default=[],
        metavar="ADDRESS",
        help="ipc:///path or tcp://127.0.0.1:port of each engine core: to listen on with --headless, else to attach to",
    )
    add(
        "--data-parallel-size",
        "-dp",
        type=at_least(1),
        default=1,
        metavar="N",
        help="engine cores that share the requests, each in a process of its own with the whole model (default: 1)",
    )
    add("--data-parallel-backend", choices=("mp",), default="mp", help="accepted; engine cores are processes")
    add(
        "--max-engine-restarts",
        type=at_least(0),
        default=5,
        metavar="N",
        help="times within a minute that a dead engine core is replaced and its requests go on; 0 stops the server "
        "(default: 5)",
    )
    add(
        "--disable-frontend-multiprocessing",
        action="store_true",
        help="run the engine core in the process that answers HTTP",
    )
    add("--enable-sleep-mode", action="store_true", help="open POST /sleep and /wake_up beside the control routes")
