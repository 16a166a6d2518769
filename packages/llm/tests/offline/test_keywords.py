"""Keywords of `LLM` that scripts for vLLM have."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from llmstack_llm import EngineArgs, EngineArgsError
from llmstack_llm.offline.keywords import own_options, served_name


def test_what_only_tunes_is_left_out_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture):
    given = {
        "dtype": "float32", "compilation_config": {"mode": 3}, "disable_custom_all_reduce": True, "max_num_seqs": None,
        "max_seq_len_to_capture": 8192, "mm_tensor_ipc": "direct_rpc", "attention_backend": "FLASH_ATTN",
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert own_options(given) == {"dtype": "float32"}
    names = [record.getMessage().partition(" has no effect: ")[0] for record in caplog.records]
    assert names == [name for name in sorted(given) if name not in ("dtype", "max_num_seqs")]


def test_every_field_is_a_keyword():
    fields = {field.name: field.default for field in dataclasses.fields(EngineArgs) if field.name != "model"}
    given = {name: value for name, value in fields.items() if value not in (None, dataclasses.MISSING)}
    assert own_options(given) == given
    assert "digests_weight_content" in given


def test_what_asks_for_nothing_is_left_out_without_a_word(caplog: pytest.LogCaptureFixture):
    assert own_options({"cpu_offload_gb": 0, "hf_token": None, "bogus": None}) == {}
    assert caplog.records == []


def test_the_keyword_of_one_key_is_put_into_its_object():
    given = {"rope_scaling": {"factor": 2}, "rope_theta": None, "hf_overrides": '{"a": 1}', "spec_method": "ngram"}
    assert own_options(given) == {
        "hf_overrides": {"rope_scaling": {"factor": 2}, "a": 1}, "speculative_config": {"method": "ngram"},
    }  # fmt: skip


def test_a_keyword_has_every_name_of_its_option():
    assert own_options({"override_pooler_config": {"normalize": False}}) == {"pooler_config": {"normalize": False}}
    same = {"pooler_config": {"normalize": False}, "override_pooler_config": {"normalize": False}}
    assert own_options(same) == {"pooler_config": {"normalize": False}}
    assert own_options({"pooler_config": None, "override_pooler_config": None}) == {}
    assert own_options({"num_gpu_blocks_override": 9}) == {"num_kv_blocks": 9}


def test_places_of_media_are_options():
    given = {"allowed_local_media_path": "", "allowed_media_domains": ["a.example"]}
    assert own_options(given) == given
    assert list(EngineArgs("m", **own_options(given)).allowed_media_domains) == ["a.example"]


@pytest.mark.parametrize(
    ("names", "rest", "first"),
    [(None, {}, ""), ("a", {"dtype": "auto"}, "a"), (["a", "b"], {}, "a"), ([], {}, ""), (("x",), {}, "x")],
)
def test_the_first_served_name_is_taken_out(names: Any, rest: dict[str, Any], first: str):
    given = {"served_model_name": names, **rest}
    assert (served_name(given), given) == (first, rest)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_modl_len": 1}, r"unknown options: max_modl_len \(did you mean max_model_len\?\)"),
        ({"pooler_config": {}, "override_pooler_config": {"normalize": True}}, "another name of pooler_config"),
        ({"ec_transfer_config": {}}, "ec_transfer_config: this use of images, audio and video is not"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb: weights are not offloaded"),
        ({"attention_config": {"use_non_causal": True}}, "attention_config: use_non_causal would change"),
        ({"download_dir": "/d", "zzz": 1}, "download_dir: set the variable HF_HUB_CACHE; unknown options: zzz"),
    ],
)
def test_what_is_missing_is_said_all_at_once(given: dict[str, Any], message: str):
    with pytest.raises(EngineArgsError, match=message):
        own_options(given)
