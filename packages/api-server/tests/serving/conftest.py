"""Servers that end with their test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from server_helpers.running import Running, Start

from llmstack_server.options.config import HTTPConfig


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[Running] = []

    async def run(http: HTTPConfig | None = None, *, is_ready: bool = True, is_engine_open: bool = True) -> Running:
        running = Running(http, is_engine_open=is_engine_open)
        started.append(running)
        if is_ready:
            await running.become_ready()
        return running

    yield run
    for running in started:
        if not running.task.done():
            running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        running.listener.close()
