"""The run of `llmstack bench serve`: warm-up, interleaved measurement, report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from llmstack_bench import event_loop
from llmstack_bench.agents import SessionLoad, check_sessions, num_turns
from llmstack_bench.arrivals import arrival_times, planned_arrivals, ramped_arrival_times
from llmstack_bench.bandwidth import read_bandwidth_gb_per_s
from llmstack_bench.client import CompletionClient, RequestOptions
from llmstack_bench.comparison import Run, Server, measure_interleaved
from llmstack_bench.datasets import MakeRequests, find_vocab_size, request_maker, warmup_requests
from llmstack_bench.errors import BenchError
from llmstack_bench.load import LoadResult, Progress, run_load
from llmstack_bench.metrics import METRICS, Goodput, parse_percentiles, summarise
from llmstack_bench.pausing import PausedTrees
from llmstack_bench.pictures import check_pictures, without_pictures
from llmstack_bench.plot import check_plot_path, write_plot
from llmstack_bench.process_tree import tree_cpu_s
from llmstack_bench.report import format_report
from llmstack_bench.workload import BenchRequest

# Runs differ in their tokens, so that a prefix cache cannot answer the second from the first.
_SEED_STEP = 1_000_003
_WARMUP_SEED = 500_009
READY_POLL_S = 0.5
RANDOM_DATASETS = ("random", "shared-prefix", "pictures", "agents", "trace", "timed-trace", "burstgpt")


def run_serve_bench(options: argparse.Namespace) -> int:
    """Runs the benchmark that the flags of `commands.serve` describe, prints it, and returns the exit code.

    Raises:
        BenchError: A flag is wrong, or a server does not answer.
    """
    bench = ServeBench.from_options(options)
    for path in options.plot:
        check_plot_path(path)
    is_interrupted = False
    try:
        event_loop.run(bench.run())
    except KeyboardInterrupt:
        if not any(server.runs for server in bench.servers):
            raise
        is_interrupted = True
        sys.stderr.write("interrupted; these are the results until then\n")
    sys.stdout.write(format_report(bench.servers, bench.percentiles, bench.metrics) + "\n")
    _write_results(bench, options)
    for path in options.plot:
        write_plot(path, bench.servers)
    if is_interrupted:
        return 130
    return 0 if all(_has_answers(server) for server in bench.servers) else 1


@dataclass(slots=True)
class ServeBench:
    """One invocation: the servers, the load, and what to compute."""

    options: argparse.Namespace
    request_options: RequestOptions
    servers: list[Server]
    percentiles: tuple[float, ...]
    metrics: tuple[str, ...]
    goodput: Goodput
    workload: dict[str, Any]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> ServeBench:
        """Checks all flags; no server is contacted."""
        ignore_eos = options.dataset_name in RANDOM_DATASETS if options.ignore_eos is None else options.ignore_eos
        request_options = RequestOptions(
            endpoint="/" + options.endpoint.lstrip("/"),
            temperature=options.temperature,
            ignore_eos=ignore_eos,
            extra_body=options.extra_body,
            headers=_headers(options.header),
            timeout_s=options.timeout,
            request_id_prefix=options.request_id_prefix,
            accepts_any_certificate=options.insecure,
        )
        if options.dataset_name == "pictures":
            check_pictures(options.num_pictures, options.picture_size, is_chat=request_options.is_chat)
        if options.dataset_name == "agents":
            check_sessions(is_chat=request_options.is_chat)
        return cls(
            options,
            request_options,
            _servers(options),
            parse_percentiles(options.metric_percentiles),
            _metrics(options.percentile_metrics),
            Goodput.parse(options.goodput),
            {},
        )

    async def run(self) -> None:
        """Measures all servers and stores the results in their `runs`."""
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                server.label: await stack.enter_async_context(CompletionClient(server.base_url, self.request_options))
                for server in self.servers
            }
            make = await self._prepare(clients)
            paused = stack.enter_context(PausedTrees(server.pid for server in self.servers if server.pid))
            for server in self.servers:
                async with _running(server, clients[server.label], paused):
                    await self._warm_up(server, clients[server.label], make)

            async def measure(server: Server, repetition: int) -> Run:
                requests = make(self.options.seed + _SEED_STEP * repetition)
                requests = requests if server.gets_pictures else without_pictures(requests)
                bandwidth = read_bandwidth_gb_per_s() if self.options.bandwidth else None
                async with _running(server, clients[server.label], paused):
                    return await self._measure(server, clients[server.label], requests, bandwidth)

            async with _profiled(clients.values()) if self.options.profile else contextlib.nullcontext():
                await measure_interleaved(self.servers, self.options.repetitions, measure)

    async def _prepare(self, clients: dict[str, CompletionClient]) -> MakeRequests:
        """Finds the models and their vocabulary size; returns the maker of requests."""
        models = []
        for server in self.servers:
            await _wait_for(clients[server.label], self.options.ready_check_timeout_sec)
            listed = await _list_models(clients[server.label], is_needed=not server.model)
            server.model = server.model or str(listed[0].get("id"))
            models.append(next((model for model in listed if model.get("id") == server.model), {"id": server.model}))
        vocab_size, source = find_vocab_size(self.options.vocab_size, self.options.tokenizer, models)
        self.workload = _workload_json(self.options) | {"vocab_size": vocab_size, "vocab_size_from": source}
        return request_maker(self.options, vocab_size, is_chat=self.request_options.is_chat)

    async def _warm_up(self, server: Server, client: CompletionClient, make: MakeRequests) -> None:
        requests = warmup_requests(make, self.options.num_warmups, self.options.seed + _WARMUP_SEED)
        if not requests:
            return
        bodies = [self.request_options.encode(request, server.model) for request in requests]
        load = await run_load(client, bodies, [0.0] * len(bodies), max_concurrency=self.options.max_concurrency)
        failed = [result.error for result in load.results if result.error is not None]
        if len(failed) == len(bodies):
            raise BenchError(f"{server.label} ({server.base_url}) answers no request of the warm-up: {failed[0]}")

    async def _measure(
        self, server: Server, client: CompletionClient, requests: Sequence[BenchRequest], bandwidth: float | None
    ) -> Run:
        title = server.label if self.options.repetitions == 1 else f"{server.label} {len(server.runs) + 1}"
        started_cpu_s = tree_cpu_s(server.pid) if server.pid else 0.0
        total = num_turns(one.session.session for one in requests if one.session) or len(requests)
        with _progress(title, total, is_shown=not self.options.disable_tqdm) as on_result:
            load: LoadResult = await self._send(server, client, requests, on_result)
        server_cpu_s = tree_cpu_s(server.pid) - started_cpu_s if server.pid else None
        return Run(load, summarise(load, self.percentiles, self.goodput, server_cpu_s), bandwidth)

    async def _send(
        self, server: Server, client: CompletionClient, requests: Sequence[BenchRequest], on_result: Progress | None
    ) -> LoadResult:
        names, limit = model_names(self.options, server.model), self.options.max_concurrency
        encode = self.request_options.encode
        if requests and (begun := requests[0].session) is not None:
            gate, speed = asyncio.Semaphore(limit) if limit else None, self.options.trace_speed
            return await SessionLoad(
                client, begun.writer, lambda request: encode(request, next(names)), speed, gate, on_result
            ).run(requests)
        bodies = [encode(request, next(names)) for request in requests]
        return await run_load(client, bodies, self._arrivals(requests), max_concurrency=limit, on_result=on_result)

    def _arrivals(self, requests: Sequence[BenchRequest]) -> list[float]:
        options = self.options
        if options.ramp_up_strategy is not None:
            rates = (options.ramp_up_start_rps, options.ramp_up_end_rps)
            return ramped_arrival_times(
                len(requests), options.ramp_up_strategy, *rates, options.burstiness, options.seed
            )
        planned = None if options.self_timed is False else planned_arrivals(requests)
        if planned is not None and (options.request_rate is None or options.self_timed):
            return planned
        rate = math.inf if options.request_rate is None else options.request_rate
        return arrival_times(len(requests), rate, options.burstiness, options.seed)


@contextlib.asynccontextmanager
async def _running(server: Server, client: CompletionClient, paused: PausedTrees) -> AsyncIterator[None]:
    """Resumes the server's process, if one was named, and waits until it answers."""
    if not server.pid:
        yield
        return
    with paused.running(server.pid):
        # A resumed server closes connections that were idle meanwhile, perhaps during the first request.
        await client.reconnect()
        await _list_models(client, is_needed=False)
        yield


@contextlib.asynccontextmanager
async def _profiled(clients: Iterable[CompletionClient]) -> AsyncIterator[None]:
    """Every server records a profile meanwhile."""
    for client in clients:
        await client.profile("start_profile")
    try:
        yield
    finally:
        for client in clients:
            await client.profile("stop_profile")


def model_names(options: argparse.Namespace, model: str) -> Iterator[str]:
    """The model of each request: one of `--lora-modules`, drawn or in turn, or the same for all."""
    adapters = options.lora_modules or [model]
    if options.lora_assignment == "round-robin" or len(adapters) == 1:
        return itertools.cycle(adapters)
    rng = random.Random(options.seed)  # noqa: S311 - a workload, not a secret
    return (rng.choice(adapters) for _ in itertools.count())


async def _wait_for(client: CompletionClient, timeout_s: float) -> None:
    """Waits until the server lists its models, or the time is over; then the run says what is wrong."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        with contextlib.suppress(BenchError):
            await client.models()
            return
        await asyncio.sleep(READY_POLL_S)


async def _list_models(client: CompletionClient, *, is_needed: bool) -> list[dict[str, Any]]:
    try:
        listed = await client.models()
    except BenchError:
        if is_needed:
            raise
        return []  # the name is known; the list would only have named the vocabulary
    if is_needed and not listed:
        raise BenchError(f"--model: {client.base_url} lists no model")
    return listed


@contextlib.contextmanager
def _progress(title: str, total: int, *, is_shown: bool) -> Iterator[Progress | None]:
    """A progress bar on standard error, if that is a terminal."""
    # At most two updates per second: the bar shares the processor with the server.
    with tqdm(total=total, desc=title, unit="req", disable=None if is_shown else True, mininterval=0.5) as bar:
        yield lambda _result: bar.update(1)


def _servers(options: argparse.Namespace) -> list[Server]:
    urls = options.base_url or [f"http://{options.host}:{options.port}"]
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise BenchError(f"--base-url {url}: must look like http://host:port", exit_code=2)
    labels = options.label or [urlsplit(url).netloc for url in urls]
    if len(labels) != len(urls) or len(set(labels)) != len(urls):
        raise BenchError(f"--label: give {len(urls)} different labels, one for each --base-url", exit_code=2)
    models = options.model * len(urls) if len(options.model) == 1 else options.model or [""] * len(urls)
    if len(models) != len(urls):
        raise BenchError("--model: give one for all servers, or one for each --base-url", exit_code=2)
    pids = options.server_pid or [0] * len(urls)
    if len(pids) != len(urls):
        raise BenchError("--server-pid: give one for each --base-url; 0 leaves that server running", exit_code=2)
    columns = zip(labels, urls, models, pids, strict=True)
    servers = [Server(label, url.rstrip("/"), model, pid=pid) for label, url, model, pid in columns]
    return _in_both_loads(servers) if options.dataset_name == "pictures" else servers


def _in_both_loads(servers: list[Server]) -> list[Server]:
    """Each server without pictures, then with them: the ratio says what a picture costs the streams beside it."""
    return [
        replace(server, label=server.label if gets_pictures else f"{server.label}, text alone", runs=[],
                gets_pictures=gets_pictures)
        for server in servers
        for gets_pictures in (False, True)
    ]  # fmt: skip


def _headers(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return ({"Authorization": f"Bearer {key}"} if key else {}) | dict(pairs)


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        reason = f"unknown metric '{unknown[0]}', known are {', '.join(METRICS)}"
        raise BenchError(f"--percentile-metrics: {reason}", exit_code=2)
    return names


def _workload_json(options: argparse.Namespace) -> dict[str, Any]:
    """Every flag that changes the requests or their times; no headers, which may contain a key."""
    hidden = {"header", "base_url", "label", "model", "host", "port", "plot", "output_json", "result_dir", "server_pid"}
    values = {name: value for name, value in vars(options).items() if name not in hidden}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _write_results(bench: ServeBench, options: argparse.Namespace) -> None:
    now = datetime.now(UTC)
    paths = [options.output_json] if options.output_json else []
    if options.save_result or options.append_result:
        name = options.result_filename or f"llmstack-bench-serve-{now:%Y%m%d-%H%M%S}.json"
        paths.append(options.result_dir / name)
    data = {
        **_vllm_values(bench, options),
        **dict(options.metadata),
        "format": 1,
        "date": now.isoformat(timespec="seconds"),
        "workload": bench.workload,
        "servers": [server.to_json(bench.servers[0], is_detailed=options.save_detailed) for server in bench.servers],
    }
    for path in paths:
        is_added = options.append_result and path is not options.output_json
        text = json.dumps(data, indent=None if is_added else 2) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if is_added else "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise BenchError(f"{path} cannot be written: {error.strerror}") from error


def _vllm_values(bench: ServeBench, options: argparse.Namespace) -> dict[str, Any]:
    """The keys that scripts find in vLLM's results, where one server was measured."""
    if len(bench.servers) != 1:
        return {}
    [server] = bench.servers
    rate = "inf" if options.request_rate is None else options.request_rate
    return {
        **server.medians(),
        "endpoint_type": options.backend or "openai",
        "backend": options.backend or "openai",
        "label": options.label[0] if options.label else None,
        "model_id": server.model,
        "tokenizer_id": None if options.tokenizer is None else str(options.tokenizer),
        "num_prompts": options.num_prompts,
        "request_rate": rate if isinstance(rate, str) or math.isfinite(rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _has_answers(server: Server) -> bool:
    return any(run.summary.values["completed"] for run in server.runs)
