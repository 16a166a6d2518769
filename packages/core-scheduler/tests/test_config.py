"""A configuration that makes no sense is refused by the names of its fields."""

import pytest

from llmstack_core_scheduler import SchedulerConfig, SpeculativeConfig


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_num_batched_tokens": -1}, ["max_num_batched_tokens"]),
        ({"max_model_len": 0}, ["max_model_len"]),
        ({"policy": "lifo"}, ["policy", "fcfs", "priority"]),
        ({"long_prefill_token_threshold": -1}, ["long_prefill_token_threshold"]),
        ({"max_prefill_tokens": -1}, ["max_prefill_tokens"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 10, "max_model_len": 11},
            ["max_num_batched_tokens", "max_model_len", "enable_chunked_prefill"],
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 1},
            ["long_prefill_token_threshold", "enable_chunked_prefill"],
        ),
        (
            {"num_lookahead_slots": 1, "speculative": SpeculativeConfig("ngram", 2)},
            ["num_lookahead_slots", "speculative"],
        ),
        (
            {"pipeline_parallel_size": 2, "speculative": SpeculativeConfig("ngram", 2)},
            ["pipeline_parallel_size 2", "drafts"],
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


def test_the_longest_ngram_may_be_looked_up():
    assert SpeculativeConfig("ngram", 4, prompt_lookup_max=32, prompt_lookup_min=32).prompt_lookup_max == 32


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"method": "eagle"}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_max": 33}, "prompt_lookup_max"),
        ({"prompt_lookup_max": 1}, "prompt_lookup_max"),
    ],
)
def test_an_error_about_drafts_names_the_field(fields, name):
    with pytest.raises(ValueError, match=name):
        SpeculativeConfig(**({"method": "ngram", "num_speculative_tokens": 4} | fields))


@pytest.mark.parametrize("value", [1.5, "2", None, float("nan")])
def test_a_limit_that_is_no_integer_is_refused_by_name(value):
    for name in ("max_num_seqs", "max_num_batched_tokens", "fair_quantum", "max_loras", "num_lookahead_slots"):
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            SchedulerConfig(**{name: value})
    with pytest.raises(ValueError, match="num_speculative_tokens must be an integer"):
        SpeculativeConfig("ngram", value)
