"""Files of requests, traces, and prompts as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmstack_bench.datasets import find_vocab_size, text_maker
from llmstack_bench.errors import BenchError
from llmstack_bench.jsonl import read_requests
from llmstack_bench.traces import TraceWorkload, read_trace
from llmstack_bench.workload import BenchRequest

TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1300, "output_length": 0, "hash_ids": [0, 1, 3]},
    {"timestamp": 2000, "input_length": 10, "output_length": 7, "hash_ids": [9]},
]


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_trace_becomes_prompts_that_share_what_its_blocks_share(tmp_path: Path):
    trace = read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE))
    first, short, second = TraceWorkload(speed=2, vocab_size=500).requests(trace)
    assert [first.arrival_s, short.arrival_s, second.arrival_s] == [0.0, 0.5, 1.0]
    assert [len(request.prompt) for request in (first, short, second)] == [1100, 10, 1300]
    assert [first.num_output_tokens, short.num_output_tokens, second.num_output_tokens] == [50, 7, 1]
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:1100]


def test_lengths_of_a_trace_are_scaled_and_its_prefixes_stay_shared(tmp_path: Path):
    trace = read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE))
    first, short, second = TraceWorkload(length_scale=0.1).requests(trace)
    assert [len(request.prompt) for request in (first, short, second)] == [110, 1, 130]
    assert first.prompt[:102] == second.prompt[:102]
    assert first.prompt[102:110] != second.prompt[102:110]


def test_a_table_of_lengths_becomes_prompts_that_share_nothing(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5000000,30,4\n2023-11-16 18:15:48.0000000,30,1\n"
    )
    one, two = TraceWorkload().requests(read_trace(path))
    assert two.arrival_s == pytest.approx(1.5)
    assert (len(one.prompt), one.num_output_tokens) == (30, 4)
    assert one.prompt != two.prompt


@pytest.mark.parametrize(("name", "total"), [("mooncake_conversation.jsonl", 40), ("azure_2023_conv.csv", 40)])
def test_published_traces_are_read(name: str, total: int):
    if not (TRACES / name).is_file():
        pytest.skip(f"needs {name} in ../shared/data/traces, which is not beside this checkout")
    requests = TraceWorkload(length_scale=0.05).requests(read_trace(TRACES / name, total))
    assert len(requests) == total
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)


@pytest.mark.parametrize(
    "row",
    ["", [1], {"timestamp": 0}, {**MOONCAKE[0], "hash_ids": [0]}, {**MOONCAKE[0], "input_length": 0},
     {**MOONCAKE[0], "timestamp": "now"}],
)  # fmt: skip
def test_a_trace_with_a_wrong_line_is_an_error_that_names_it(tmp_path: Path, row: object):
    path = write_lines(tmp_path / "t.jsonl", [MOONCAKE[0], row])
    with pytest.raises(BenchError, match="request 2 cannot be read"):
        read_trace(path)


def test_a_file_of_requests_may_hold_text_tokens_and_conversations(tmp_path: Path):
    messages = [{"role": "user", "content": "hi"}]
    path = write_lines(
        tmp_path / "r.jsonl",
        [{"prompt": "hi", "output_tokens": 5}, {"prompt_token_ids": [4, 5]}, {"messages": messages, "timestamp": 250}],
    )
    assert read_requests(path, default_output_tokens=9) == [
        BenchRequest("hi", 5),
        BenchRequest([4, 5], 9),
        BenchRequest(messages, 9, 0.25),
    ]
    assert len(read_requests(path, 2)) == 2


@pytest.mark.parametrize(
    "row",
    [3, {}, {"prompt": ""}, {"prompt": "a", "messages": []}, {"prompt_token_ids": [True]}, {"prompt_token_ids": []},
     {"prompt": "a", "output_tokens": 0}, {"prompt": "a", "timestamp": -1}, {"messages": ["hi"]}],
)  # fmt: skip
def test_a_file_of_requests_with_a_wrong_line_is_an_error_that_names_it(tmp_path: Path, row: object):
    path = write_lines(tmp_path / "r.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(BenchError, match="line 2"):
        read_requests(path)


@pytest.mark.parametrize("read", [read_requests, read_trace])
def test_an_empty_or_missing_file_is_an_error(tmp_path: Path, read):
    with pytest.raises(BenchError, match="No such file"):
        read(tmp_path / "absent")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BenchError, match="holds no requests"):
        read(tmp_path / "empty")


def test_token_ids_become_as_many_words_without_a_tokenizer():
    assert len(text_maker(None)([3, 4, 99, 1000]).split()) == 4


def test_token_ids_become_text_through_a_tokenizer(tmp_path: Path):
    from llmstack_llm.testing import byte_tokenizer

    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert len(text_maker(tmp_path)([40, 41, 42])) == 3
    assert find_vocab_size(None, tmp_path, []) == (257, "--tokenizer")
    with pytest.raises(BenchError, match="--tokenizer"):
        text_maker(tmp_path / "absent.json")


def test_the_vocabulary_is_the_smallest_of_those_known_else_a_safe_guess(tmp_path: Path):
    for name, size in (("a", 300), ("b", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    known = [{"id": "a", "root": str(tmp_path / "a")}, {"id": str(tmp_path / "b")}]
    assert find_vocab_size(None, None, known)[0] == 200
    assert find_vocab_size(None, None, [*known, {"id": "elsewhere"}])[0] == 256
    assert find_vocab_size(77, None, known)[0] == 77
