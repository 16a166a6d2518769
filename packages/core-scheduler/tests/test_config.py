"""A configuration that makes no sense is refused by the names of its fields."""

import pytest

from llmstack_core_scheduler import SchedulerConfig


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_num_batched_tokens": -1}, ["max_num_batched_tokens"]),
        ({"max_model_len": 0}, ["max_model_len"]),
        ({"policy": "lifo"}, ["policy", "fcfs", "priority"]),
        ({"long_prefill_token_threshold": -1}, ["long_prefill_token_threshold"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 10, "max_model_len": 11},
            ["max_num_batched_tokens", "max_model_len", "enable_chunked_prefill"],
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 1},
            ["long_prefill_token_threshold", "enable_chunked_prefill"],
        ),
    ],
)
def test_an_error_names_the_fields(fields, names):
    with pytest.raises(ValueError) as caught:  # the names are looked for below
        SchedulerConfig(**fields)
    assert all(name in str(caught.value) for name in names)


def test_the_defaults_are_those_users_know():
    config = SchedulerConfig()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 2048)
    assert config.enable_chunked_prefill
    assert config.policy == "fcfs"
