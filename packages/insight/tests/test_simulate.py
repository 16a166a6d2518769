"""Traces through the real scheduler and cache, compared with ideals and eviction rules computed independently."""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_engine_core import SchedulerConfig
from llmstack_insight.commands.simulate import SimulateCommand
from llmstack_insight.simulate import (
    Arrivals,
    LinearCostModel,
    Report,
    SimulationConfig,
    TraceFormat,
    TraceRequest,
    read_trace,
    simulate,
)

TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
MOONCAKE, AZURE = TRACES / "mooncake_conversation.jsonl", TRACES / "azure_2023_conv.csv"
PIECE = 512


def trace_file(path: Path) -> Path:
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/traces/{path.name}, which is not beside this checkout")
    return path


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests whose prompts branch off each other; the last piece may be a part of one that others hold whole."""
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        hash_ids = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
        rest = draw(st.sampled_from([1, 7, 64, 100, 511, 512]))
        arrival_s = draw(st.sampled_from([0.0, 0.1, 1.0]))
        requests.append(TraceRequest(arrival_s, PIECE * (len(hash_ids) - 1) + rest, draw(st.integers(0, 9)), hash_ids))
    return sorted(requests, key=lambda request: request.arrival_s)


def tokens(request: TraceRequest) -> list[tuple[int, int]]:
    """A prompt as the trace means it: (id, place in it)."""
    assert request.hash_ids is not None
    return [(hash_id, place) for hash_id in request.hash_ids for place in range(PIECE)][: request.num_prompt_tokens]


def ideal_hit_tokens(trace: list[TraceRequest], block_size: int) -> int:
    """Straight from the rule: with each request before, the tokens in common from the start; whole blocks only."""
    hit_tokens, seen = 0, []
    for request in trace:
        prompt = tokens(request)
        common = 0
        for other in seen:
            equal = 0
            while equal < min(len(prompt), len(other)) and prompt[equal] == other[equal]:
                equal += 1
            common = max(common, equal)
        hit_tokens += block_size * (min(common, len(prompt) - 1) // block_size)
        seen.append(prompt)
    return hit_tokens


def ideal_hit_tokens_by_ids(trace: list[TraceRequest], block_size: int) -> int:
    """The same for long traces: walks a tree of pieces, each as long as the longest that was seen of it."""
    hit_tokens, tree = 0, {}
    for request in trace:
        node, common, left, is_equal = tree, 0, request.num_prompt_tokens, True
        for hash_id in request.hash_ids or ():
            length = min(left, PIECE)
            known = node.setdefault(hash_id, [0, {}])
            if is_equal:
                common += min(known[0], length)
                is_equal = known[0] == PIECE
            known[0] = max(known[0], length)
            node, left = known[1], left - length
        hit_tokens += block_size * (min(common, request.num_prompt_tokens - 1) // block_size)
    return hit_tokens


class LRU:
    """A pool of blocks that caches prompts and gives up what was used least recently; one request at a time."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_empty = num_blocks
        self.block_size = block_size
        self.cached: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        self.hit_tokens = self.evictions = 0

    def run(self, prefixes: list[tuple[Any, ...]], num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One request; `prefixes` are those that end with a whole block of the prompt."""
        size = self.block_size
        held = []
        for prefix in prefixes[: (num_prompt_tokens - 1) // size]:
            if prefix not in self.cached:
                break
            held.append(prefix)
            del self.cached[prefix]
        self.hit_tokens += size * len(held)
        num_prompt_blocks = -(-num_prompt_tokens // size)
        num_taken = self._take(num_prompt_blocks - len(held))
        # The last block may be there already: it was not used, since one token has to be computed.
        new = [prefix for prefix in prefixes[len(held) :] if prefix not in self.cached]
        num_slots = max(num_prompt_tokens + num_output_tokens - 1, num_prompt_tokens)
        num_taken += self._take(-(-num_slots // size) - num_prompt_blocks)
        self.num_empty += num_taken - len(new)
        for prefix in reversed(held + new):  # the end of a prompt is given up before its beginning
            self.cached[prefix] = None

    def _take(self, num_blocks: int) -> int:
        from_empty = min(num_blocks, self.num_empty)
        self.num_empty -= from_empty
        for _ in range(num_blocks - from_empty):
            self.cached.popitem(last=False)
            self.evictions += 1
        return num_blocks


def run(trace: list[TraceRequest], block_size: int, num_blocks: int | None = None, **changes: Any) -> Report:
    return simulate(trace, SimulationConfig(num_blocks=num_blocks, block_size=block_size, **changes))


@settings(max_examples=60)
@given(traces(), st.sampled_from([1, 16, 48, 512, 600]))
def test_one_after_the_other_in_an_unbounded_pool_hits_exactly_the_ideal(
    trace: list[TraceRequest], block_size: int
) -> None:
    report = run(trace, block_size, arrivals=Arrivals.SEQUENTIAL)
    assert report.num_hit_tokens == ideal_hit_tokens(trace, block_size) == ideal_hit_tokens_by_ids(trace, block_size)
    assert report.num_evictions == report.num_preemptions == 0
    assert report.num_requests == len(trace)
    assert report.num_prompt_tokens == sum(request.num_prompt_tokens for request in trace)
    assert report.num_output_tokens == sum(request.num_output_tokens for request in trace)


@settings(max_examples=60)
@given(traces(), st.sampled_from([32, 64, 100, 512]), st.integers(0, 60))
def test_one_after_the_other_in_a_small_pool_hits_what_an_lru_does(
    trace: list[TraceRequest], block_size: int, num_spare_blocks: int
) -> None:
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace)
    num_blocks = -(-longest // block_size) + num_spare_blocks
    oracle = LRU(num_blocks, block_size)
    for request in trace:
        prompt = tokens(request)
        prefixes = [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]
        oracle.run(prefixes, len(prompt), request.num_output_tokens)
    report = run(trace, block_size, num_blocks, arrivals=Arrivals.SEQUENTIAL)
    assert (report.num_hit_tokens, report.num_evictions) == (oracle.hit_tokens, oracle.evictions)


@settings(max_examples=40)
@given(traces(), st.integers(0, 40), st.integers(1, 4), st.sampled_from([64, 700]))
def test_under_load_every_request_ends_with_all_its_tokens(
    trace: list[TraceRequest], num_spare_blocks: int, max_num_seqs: int, budget: int
) -> None:
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace)
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    report = run(trace, 64, -(-longest // 64) + num_spare_blocks, scheduler=scheduler)
    assert report.num_requests == len(trace)
    assert report.num_output_tokens == sum(request.num_output_tokens for request in trace)
    assert len(report.queue_s) == len(report.ttft_s) == len(trace)
    assert len(report.itl_s) == sum(max(request.num_output_tokens - 1, 0) for request in trace)
    assert all(map(float.__lt__, sorted(report.queue_s), sorted(report.ttft_s)))
    assert 1 <= report.max_running <= max_num_seqs


def test_a_request_alone_takes_what_the_cost_model_says() -> None:
    cost_model = LinearCostModel(base_s=1.0, prefill_token_s=0.01, decode_row_s=0.5, context_token_s=0.001)
    report = simulate([TraceRequest(7.0, 100, 3)], SimulationConfig(), cost_model)
    assert list(report.ttft_s) == pytest.approx([1 + 100 * 0.01 + 100 * 0.001])
    assert list(report.itl_s) == pytest.approx([1 + 0.5 + 101 * 0.001, 1 + 0.5 + 102 * 0.001])
    assert report.simulated_s == pytest.approx(7 + sum(report.ttft_s) + sum(report.itl_s))


def test_a_tiny_pool_preempts_and_a_request_beyond_it_is_refused() -> None:
    trace = [TraceRequest(0.0, 40, 40) for _ in range(4)] + [TraceRequest(0.0, 400, 40)]
    report = run(trace, 16, 10)
    assert (report.num_requests, report.num_refused) == (4, 1)
    assert report.num_preemptions > 0


def test_a_trace_of_which_nothing_fits_has_no_distributions() -> None:
    report = run([TraceRequest(0.0, 400, 40)], 16, 2)
    assert (report.num_requests, report.num_refused, report.to_json()["ttft_s"]["p50"]) == (0, 1, None)
    assert "p50 -" in report.to_text()


def test_the_queue_counts_what_has_arrived_and_not_begun() -> None:
    trace = [TraceRequest(0.0, 10, 5) for _ in range(50)]
    report = run(trace, 16, scheduler=SchedulerConfig(max_num_seqs=1))
    assert report.max_waiting == 50
    assert max(report.queue_s) > min(report.queue_s) == 0.0


@pytest.mark.parametrize("block_size", [pytest.param(16, marks=pytest.mark.full), 512])
def test_mooncake_hits_its_own_ideal(block_size: int) -> None:
    trace = read_trace(trace_file(MOONCAKE), TraceFormat.MOONCAKE, 300)
    report = run(trace, block_size, arrivals=Arrivals.SEQUENTIAL)
    assert report.num_hit_tokens == ideal_hit_tokens_by_ids(trace, block_size) > 0


@pytest.mark.parametrize("num_blocks", [1000, *(pytest.param(n, marks=pytest.mark.full) for n in (300, 4000))])
def test_mooncake_in_a_bounded_pool_hits_what_an_lru_does(num_blocks: int) -> None:
    trace = read_trace(trace_file(MOONCAKE), TraceFormat.MOONCAKE, 300)
    oracle = LRU(num_blocks, PIECE)
    for request in trace:
        ids = (request.hash_ids or ())[: request.num_prompt_tokens // PIECE]
        prefixes = [ids[: end + 1] for end in range(len(ids))]
        oracle.run(prefixes, request.num_prompt_tokens, request.num_output_tokens)
    report = run(trace, PIECE, num_blocks, arrivals=Arrivals.SEQUENTIAL)
    assert (report.num_hit_tokens, report.num_evictions) == (oracle.hit_tokens, oracle.evictions)
    assert report.num_evictions > 0


def test_azure_shares_nothing() -> None:
    trace = read_trace(trace_file(AZURE), TraceFormat.AZURE, 200)
    report = run(trace, 16)
    assert (trace[0].arrival_s, trace[0].num_prompt_tokens, trace[0].num_output_tokens) == (0.0, 374, 44)
    assert (report.num_requests, report.num_hit_tokens, report.num_preemptions) == (200, 0, 0)


@pytest.mark.parametrize(
    ("text", "trace_format", "expected"),
    [
        ("", "mooncake", "holds no requests"),
        ("{]", "mooncake", "request 1 cannot be read"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "mooncake", "it has no hash_ids"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "mooncake", "input_length"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "mooncake", "513 tokens"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}', "mooncake", "hash_ids"),
        ('{"timestamp": NaN, "input_length": 9, "output_length": 1, "hash_ids": [1]}', "mooncake", "timestamp"),
        ("[1, 2]", "mooncake", "request 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "azure", "request 1"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", "azure", "it has no GeneratedTokens"),
        ("\x00", "azure", "holds no requests"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_in_one_line(
    text: str, trace_format: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    code, out, err = command(capsys, "--trace", path, "--format", trace_format)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert expected in err
    assert "cannot be read" in command(capsys, "--trace", tmp_path / "absent", "--format", trace_format)[2]


def command(capsys: pytest.CaptureFixture[str], *line: object) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    SimulateCommand().add_arguments(parser)
    code = SimulateCommand().run(parser.parse_args(list(map(str, line))))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def small_trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    lengths = {"input_length": 600, "output_length": 4}
    rows = [{"timestamp": 100 * index, **lengths, "hash_ids": [0, index]} for index in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_json_is_one_object_with_the_agreed_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "--trace", small_trace(tmp_path), "--format", "mooncake", "--limit", 4, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["requests"], found["prompt_tokens"], found["hit_tokens"]) == (4, 2400, 3 * 512)
    assert found["hit_rate"] == 3 * 512 / 2400
    assert (found["preemptions"], found["evictions"], found["goodput"]["share"]) == (0, 0, 1.0)
    for name in ("ttft_s", "itl_s", "queue_s"):
        assert list(found[name]) == ["p50", "p90", "p99"]
    assert found["simulated_s"] > 0.3
    assert found["wall_s"] > 0


def test_without_json_it_is_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(
        capsys,
        "--trace",
        small_trace(tmp_path),
        "--format",
        "mooncake",
        "--num-blocks",
        100,
        "--arrivals",
        "sequential",
    )
    assert code == 0
    assert "100 blocks of 16" in out
    assert len(out.splitlines()) == 9


def test_settings_that_cannot_work_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--trace", small_trace(tmp_path), "--format", "mooncake")
    code, _, err = command(capsys, *line, "--long-prefill-token-threshold", -1)
    assert (code, err.count("\n")) == (1, 1)
    assert "long_prefill_token_threshold" in err
    assert "no-such-model.json" in command(capsys, *line, "--cost-model", "no-such-model.json")[2]


@pytest.mark.parametrize("rate", [5.0, 12.0, 0.0])
def test_short_prompts_beside_a_long_one_have_their_first_tokens_soon(rate: float) -> None:
    """Within twice the time without it; the throughput is 0.98 where there is time for all, or all come at once."""
    short = [TraceRequest(index / rate if rate else 0.0, 1024, 16, (2 * index, 2 * index + 1)) for index in range(120)]
    long = TraceRequest(4.0 if rate else 0.0, 65_536, 16, tuple(range(1000, 1128)))
    both = sorted([*short, long], key=lambda request: request.arrival_s)
    before, turns = (SimulationConfig(SchedulerConfig(shorter_prompts_first=is_on)) for is_on in (False, True))
    alone, beside, by_default = simulate(short, turns), simulate(both, turns), simulate(both, before)
    assert beside.num_requests == 121
    slowest = sorted(beside.ttft_s)[:-1][-2]  # the p99 of 120
    if rate:
        assert slowest <= 2 * max(alone.ttft_s) < sorted(by_default.ttft_s)[-3]
    if rate != 12.0:
        assert beside.simulated_s * 0.98 <= by_default.simulated_s
