"""Environment variables in a report that is sent to others."""

from __future__ import annotations

import pytest

from llmstack_command.collect_env.software import HIDDEN, relevant_variables


def test_only_variables_that_matter_are_shown():
    assert relevant_variables({"OMP_NUM_THREADS": "2", "USER": "me", "LLMSTACK_PORT": "1"}) == {
        "LLMSTACK_PORT": "1",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.parametrize(
    "name", ["LLMSTACK_API_KEY", "HF_TOKEN", "VLLM_API_KEY", "HF_HUB_PASSWORD", "OTEL_EXPORTER_OTLP_HEADERS"]
)
def test_secrets_are_named_but_not_shown(name: str):
    assert relevant_variables({name: "s3cret"}) == {name: HIDDEN}


def test_a_word_that_only_looks_secret_is_shown():
    assert relevant_variables({"TOKENIZERS_PARALLELISM": "false"}) == {"TOKENIZERS_PARALLELISM": "false"}


def test_credentials_in_an_address_are_taken_out():
    shown = relevant_variables({"https_proxy": "http://user:pass@proxy:3128", "HF_ENDPOINT": "https://mirror/x"})
    assert shown == {"https_proxy": "http://***@proxy:3128", "HF_ENDPOINT": "https://mirror/x"}
