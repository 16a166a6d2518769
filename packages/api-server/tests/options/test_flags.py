"""Every flag people know from vLLM is accepted or refused with a sentence; the page on flags lists them all."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.options.accepted_flags import ACCEPTED_FLAGS
from llmstack_llm.options.refused_flags import REFUSED_FLAGS
from llmstack_llm.options.resolve import Settings
from llmstack_server.commands import ServeCommand
from llmstack_server.options.command_line import (
    ALL_FOREIGN_FLAGS,
    SERVE_OPTIONS,
    VLLM_FLAGS,
    settings_from,
)
from llmstack_server.options.config import ServeConfig, config_from
from llmstack_server.options.environment import export_hub_settings
from llmstack_server.options.errors import ServeError
from llmstack_server.options.secret import Secret
from llmstack_server.serving.api_servers import shared_configuration
from llmstack_server.serving.api_worker import configuration_of
from llmstack_server.web.clients import clients_of
from llmstack_types.options import REQUIRED

# Flags of older versions, which published lines still have.
OLDER_FLAGS = (
    "--disable-log-requests --swap-space --guided-decoding-backend --enable-reasoning --task --use-v2-block-manager "
    "--num-scheduler-steps --multi-step-stream-outputs --preemption-mode --num-lookahead-slots --num-redundant-experts "
    "--max-context-len-to-capture --max-seq-len-to-capture --disable-async-output-proc"
)

REFUSED = {name: flag for name, flag in ALL_FOREIGN_FLAGS.items() if not flag.is_accepted}


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServeCommand().add_arguments(parser)
    return parser


def known_flags() -> dict[str, argparse.Action]:
    return dict(new_parser()._option_string_actions)


def config(*line: str) -> ServeConfig:
    return config_from(settings_from(new_parser().parse_args(line), {}))


def test_every_flag_of_the_listed_version_is_an_option_or_accepted_or_refused():
    assert (VLLM_FLAGS.engine, VLLM_FLAGS.version) == ("vllm", "0.33.0")
    assert len(VLLM_FLAGS.kinds) > 300
    assert sorted({*VLLM_FLAGS.kinds, *VLLM_FLAGS.short_to_flag, *OLDER_FLAGS.split()} - set(known_flags())) == []


def test_older_switches_take_no_word_from_the_line():
    found = config("--enable-reasoning", "org/m", "--use-v2-block-manager", "--load-format", "bitsandbytes")
    assert (found.model, found.engine.load_format) == ("org/m", "safetensors")
    assert [flag.flag for flag in found.settings.accepted] == [
        "--enable-reasoning", "--use-v2-block-manager", "--load-format"
    ]  # fmt: skip


def test_defaults_are_in_order_as_they_are():
    given = [option for option in SERVE_OPTIONS if option.default is not REQUIRED]
    assert [option.name for option in given if option.from_keyword(option.default) != option.default] == []


def test_every_short_form_means_its_flag():
    actions = known_flags()
    for short, flag in VLLM_FLAGS.short_to_flag.items():
        assert actions[short] is actions[flag], short


def test_every_switch_has_its_negative_form():
    switches = [name for name, kind in VLLM_FLAGS.kinds.items() if kind == "switch"]
    assert sorted({f"--no-{name.removeprefix('--')}" for name in switches} - set(known_flags())) == []


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_refused_flag_says_why(flag: str):
    if ALL_FOREIGN_FLAGS[flag].accepts(""):
        line = [] if ALL_FOREIGN_FLAGS[flag].is_switch else [flag, "surely not harmless"]
    else:
        line = [flag] if ALL_FOREIGN_FLAGS[flag].is_switch else [flag, "surely not harmless"]
    if not line:  # harmless in all forms
        return
    with pytest.raises(ServeError) as caught:
        config(*line)
    assert caught.value.exit_code == 2
    reason = ALL_FOREIGN_FLAGS[flag].reason
    assert str(caught.value) == f"{flag}: {reason}"
    assert not reason.endswith(".")


@pytest.mark.parametrize("flag", sorted(ACCEPTED_FLAGS))
def test_an_accepted_flag_has_a_reason_in_the_log_and_in_the_table(flag: str):
    form = ALL_FOREIGN_FLAGS[flag]
    value = "" if form.is_switch else '{"mode": 3}' if form.is_json else "3"
    found = config(flag, *filter(None, [value]))
    [accepted] = found.settings.accepted
    assert (accepted.flag, accepted.value, accepted.source) == (flag, value, "command line")
    assert [line for line in found.warnings if line == str(accepted)]
    assert f"command line, no effect: {form.reason}" in found.settings.table()
    again = Settings.from_plain(SERVE_OPTIONS, found.settings.to_plain())
    assert again.accepted == (accepted,)


def test_json_of_an_accepted_flag_is_read_and_what_would_change_answers_is_refused():
    for value, reason in {
        "{": "is not valid JSON",
        "[1]": "is not a JSON object",
        '{"use_prefill_query_quantization": true}': "use_prefill_query_quantization would change log-probabilities",
    }.items():
        with pytest.raises(ServeError, match=reason):
            config("--attention-config", value)
    assert config("--attention-config", '{"use_prefill_query_quantization": false}').settings.accepted


def test_the_name_of_the_demo_model_in_the_api_is_one_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    named = config("llmstack-demo")
    assert (named.model, named.served_model_names) == (None, ("llmstack-demo",))
    (tmp_path / "llmstack-demo").mkdir()
    assert config("llmstack-demo").model == "llmstack-demo"


@pytest.mark.parametrize(
    ("words", "limits", "is_text_only"),
    [
        (["--limit-mm-per-prompt", "image=5,video=1"], {"image": 5, "video": 1}, False),
        (["--limit-mm-per-prompt", "image=0"], {"image": 0}, True),
        (["--limit-mm-per-prompt", '{"image": 0, "video": {"count": 0}}'], {"image": 0, "video": {"count": 0}}, True),
        (["--language-model-only"], None, True),
        ([], None, False),
    ],
)
def test_text_alone_is_asked_for_in_several_forms(words: list[str], limits: object, is_text_only: bool):
    engine = config(*words).engine
    assert (engine.limit_mm_per_prompt, engine.is_text_only) == (limits, is_text_only)


def test_limits_of_media_that_are_no_numbers_are_refused():
    with pytest.raises(ServeError, match="--limit-mm-per-prompt"):
        config("--limit-mm-per-prompt", "image=many")


@pytest.mark.parametrize(
    ("line", "flag", "value"),
    [
        (["-O3"], "-O", "3"),
        (["-O", "0"], "-O", "0"),
        (["-cc", "3"], "-cc", "3"),
        (["--no-enable-flashinfer-autotune"], "--no-enable-flashinfer-autotune", "false"),
        (["--attention-backend", "FLASHINFER"], "--attention-backend", "FLASHINFER"),
        (["--load-format", "RUNAI_STREAMER"], "--load-format", "RUNAI_STREAMER"),
    ],
)
def test_short_and_negative_forms_and_capitals_are_accepted(line: list[str], flag: str, value: str):
    [accepted] = config(*line).settings.accepted
    assert (accepted.flag, accepted.value) == (flag, value)


def test_a_switch_takes_no_value_from_the_words_after_it():
    assert config("--disable-custom-all-reduce", "gpt2").model == "gpt2"
    assert config("--no-enable-lora", "gpt2").model == "gpt2"


def test_words_of_closed_sets_may_be_capitals_and_lengths_auto():
    assert config("--dtype", "BFLOAT16").engine.dtype == "bfloat16"
    assert config("--kv-cache-dtype", "FP8_E4M3").engine.kv_cache_dtype == "fp8"
    assert config("--max-model-len", "auto").engine.max_model_len is None
    assert config("-sc", '{"method": "ngram", "num_speculative_tokens": 2}').engine.speculative_config is not None
    assert config("--load-format", "fastsafetensors").engine.load_format == "safetensors"


@pytest.mark.parametrize("method", ["longcat_flash_mtp", "dspark", "mlp_speculator"])
def test_draft_models_are_refused_by_the_name_of_their_method(method: str):
    line = ["--speculative-config", f'{{"method": "{method}", "model": "m", "num_speculative_tokens": 1}}']
    with pytest.raises(ServeError, match=f"drafts of the method '{method}' are not supported yet"):
        config(*line)


def test_a_refusal_names_only_flags_that_there_are():
    named = {word.strip("'") for flag in ALL_FOREIGN_FLAGS.values() for word in re.findall(r"--[a-z-]+", flag.reason)}
    assert sorted(named - {flag for option in SERVE_OPTIONS for flag in option.flags}) == []


def test_no_flag_is_both_an_option_and_foreign():
    assert {flag for option in SERVE_OPTIONS for flag in option.flags} & set(ALL_FOREIGN_FLAGS) == set()
    replaced = {flag for option in SERVE_OPTIONS for flag in option.declared.replaces}
    assert replaced & {*REFUSED_FLAGS, *ACCEPTED_FLAGS} == set()
    assert set(REFUSED_FLAGS) & set(ACCEPTED_FLAGS) == set()


def test_keys_and_flags_are_each_an_option_alone():
    keys = [option.key for option in SERVE_OPTIONS]
    names = [option.name for option in SERVE_OPTIONS]
    flags = [flag for option in SERVE_OPTIONS for flag in (*option.flags, *option.negative_flags)]
    variables = [name for option in SERVE_OPTIONS for name in option.variables]
    for values in (keys, names, flags, variables):
        assert len(set(values)) == len(values)


@pytest.mark.parametrize(
    ("flag", "value"), [(f, v) for f, flag in ALL_FOREIGN_FLAGS.items() for v in flag.harmless if v or flag.is_switch]
)
def test_values_that_change_nothing_pass(flag: str, value: str):
    if ALL_FOREIGN_FLAGS[flag].is_switch and value not in ("true", "false", "0", ""):
        return  # one reason for several flags, of which this one takes no value
    if ALL_FOREIGN_FLAGS[flag].is_switch:
        line = [f"--no-{flag.removeprefix('--')}" if value in ("false", "0") else flag]
    else:
        line = [flag, value]
    assert config(*line).settings.problems == []


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        (["--uds", "/run/s", "--uds-mode", "660"], "uds_mode", 0o660),
        (["--uds", "/run/s"], "enable_control_routes", True),
        (["--root-path", "llm/"], "root_path", "/llm"),
        (["--root-path", "/"], "root_path", ""),
        (["--allowed-origins", '["http://a", "http://b"]'], "cors.origins", ("http://a", "http://b")),
        (["--allowed-origins", "http://a", "http://b"], "cors.origins", ("http://a", "http://b")),
        (["--allowed-origins", "*", "--allowed-methods", '["GET"]', "--allow-credentials"], "cors.methods", ("GET",)),
        (["--allowed-headers", "x-a", "--allowed-headers", "x-b"], "cors.headers", ("x-a", "x-b")),
        (["--middleware", "a:b", "--middleware", "c.d"], "middleware", ("a:b", "c.d")),
        (["--h11-max-incomplete-event-size", "8K"], "max_header_bytes", 8192),
        (["--max-body-bytes", "16M"], "max_body_bytes", 16 << 20),
        (["--h11-max-header-count", "7"], "max_num_headers", 7),
        (["--disable-fastapi-docs"], "has_docs", False),
        (["--enable-log-requests", "--max-log-len", "0"], "request_log.max_chars", 0),
        (["--enable-log-requests", "--enable-log-outputs"], "request_log.logs_outputs", True),
        (["--no-enable-log-requests"], "request_log.logs_requests", False),
        (["--rate-limit-requests-per-minute", "60"], "rate_limits.max_requests_per_minute", 60),
        (["--max-concurrent-requests-per-key", "4"], "rate_limits.max_concurrent_requests", 4),
        (["--enable-force-include-usage"], "answers.forces_usage", True),
        (["--return-tokens-as-token-ids"], "answers.shows_tokens_as_ids", True),
        (["--enable-tokenizer-info-endpoint"], "has_tokenizer_info", True),
        (["--ssl-certfile", "c", "--ssl-keyfile", "k"], "tls.keyfile", "k"),
        (["--ssl-certfile", "c", "--ssl-ca-certs", "a", "--ssl-cert-reqs", "2"], "tls.cert_reqs", 2),
        (["--ssl-certfile", "c", "--enable-ssl-refresh"], "tls.is_refreshed", True),
        ([], "tls", None),
    ],
)
def test_flags_of_the_http_side_reach_their_setting(line: list[str], path: str, value: Any):
    found: Any = config(*line).http
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (["--max-logprobs", "-1"], "max_logprobs", -1),
        (["--stream-interval", "3"], "stream_interval", 3),
        (["--max-num-queued-tokens", "4k"], "max_num_queued_tokens", 4000),
        (["--hf-overrides", '{"a": 1}'], "hf_overrides", {"a": 1}),
        (["--override-generation-config", '{"top_k": 1}'], "override_generation_config", {"top_k": 1}),
        (["--generation-config", "folder"], "generation_config", "folder"),
        (["--tokenizer-revision", "main"], "tokenizer_revision", "main"),
        (["--skip-tokenizer-init"], "skip_tokenizer_init", True),
        (["--chat-template", "{{ messages }}"], "chat_template", "{{ messages }}"),
        (["--chat-template", __file__], "chat_template", __file__),
        (["--logits-processors", "a.b:C"], "logits_processors", ("a.b:C",)),
    ],
)
def test_flags_of_the_engine_reach_it(line: list[str], name: str, value: Any):
    assert getattr(config(*line).engine, name) == value


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (["--ssl-keyfile", "k"], "--ssl-keyfile needs --ssl-certfile"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh needs --ssl-certfile"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "1"], "--ssl-cert-reqs needs --ssl-ca-certs"),
        (["--enable-log-requests", "--disable-log-requests"], "contradict"),
        (["--middleware", "a:b", "--middleware", "nothing"], "--middleware: 'nothing' is not of the form module:name"),
        (["--extra-routes", ":x"], "--extra-routes: ':x' is not of the form module:name"),
        (["--enable-log-outputs"], "--enable-log-outputs needs --enable-log-requests"),
        (["--lora-root", "/absent {x}"], "--lora-root needs --enable-lora"),
        (["--enable-lora", "--lora-root", "/absent {x}"], "root: there is no folder /absent"),
    ],
)
def test_flags_that_need_others_say_so(line: list[str], word: str):
    with pytest.raises(ServeError, match=word) as caught:
        config(*line)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "line",
    [
        ["--allowed-origins", "[5]"],
        ["--allowed-origins", "["],
        ["--uds-mode", "rw"],
        ["--uds-mode", "1777"],
        ["--max-log-len", "-1"],
        ["--h11-max-incomplete-event-size", "10"],
        ["--rate-limit-requests-per-minute", "0"],
        ["--ssl-cert-reqs", "3"],
        ["--max-logprobs", "-2"],
        ["--stream-interval", "0"],
        ["--tokenizer-mode", "slow"],
        ["--hf-overrides", "[]"],
        ["--chat-template", "absent.jinja"],
        ["--logits-processors", "module.Class"],
    ],
)
def test_values_that_cannot_be_are_refused(line: list[str]):
    with pytest.raises(ServeError, match=f"^{line[0]}: ") as caught:
        config(*line)
    assert caught.value.exit_code == 2


def test_keys_may_come_from_a_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("sk-a\n\n  sk-b \n")
    found = config("--api-key-file", str(file), "--require-auth")
    assert (len(found.http.api_keys), found.warnings) == (2, ())
    assert found.http.api_keys[1].matches(b"sk-b")
    assert len(config("--api-key-file", str(file), "--api-key", "sk-c").http.api_keys) == 3
    file.unlink()  # another process makes the same of the flags without reading it
    again = config_from(Settings.from_plain(SERVE_OPTIONS, found.settings.to_plain()))
    assert again.http.api_keys[0].matches(b"sk-a")


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\n", "no key"), (b"\xff", "not UTF-8")])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None, reason: str):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ServeError, match=f"--api-key-file .*{reason}"):
        config("--api-key-file", str(tmp_path / "keys"))


def test_keys_of_operators_are_further_keys(tmp_path: Path):
    (tmp_path / "keys").write_text("sk-a\nsk-root\n")
    (tmp_path / "operators").write_text("sk-root\nsk-b\n")
    found = config("--api-key-file", str(tmp_path / "keys"), "--operator-key-file", str(tmp_path / "operators"))
    assert found.http.api_keys == tuple(map(Secret, ("sk-a", "sk-root", "sk-b")))
    assert found.http.operator_keys == {Secret("sk-root"), Secret("sk-b")}
    alone = config("--operator-key-file", str(tmp_path / "operators"), "--require-auth")
    assert len(alone.http.api_keys) == 2
    with pytest.raises(ServeError, match=r"--operator-key-file .*No such file"):
        config("--operator-key-file", str(tmp_path / "absent"))


def test_another_process_has_the_same_operators_and_secret_without_the_file(tmp_path: Path):
    (tmp_path / "operators").write_text("sk-root\nsk-b\n")
    found = config("--operator-key-file", str(tmp_path / "operators"), "--api-key", "sk-a", "--require-auth")
    (tmp_path / "operators").unlink()
    again = configuration_of(json.loads(json.dumps(shared_configuration(found))))
    assert (again.http.api_keys, again.http.operator_keys) == (found.http.api_keys, found.http.operator_keys)
    assert clients_of(again) == clients_of(found)


def test_a_unix_socket_takes_the_place_of_host_and_port():
    assert config("--uds", "/run/s").warnings == ()
    [warning] = config("--uds", "/run/s", "--host", "0.0.0.0", "--port", "1").warnings
    assert "--host and --port are ignored" in warning


def test_the_hubs_settings_are_exported_and_a_token_on_the_line_warns():
    variables: dict[str, str] = {"HF_TOKEN": "before"}
    export_hub_settings(config("--hf-token").settings, variables)
    assert variables == {"HF_TOKEN": "before"}
    export_hub_settings(config("--hf-token", "t", "--download-dir", "/d").settings, variables)
    assert variables == {"HF_TOKEN": "t", "HF_HUB_CACHE": "/d"}
    assert any("HF_TOKEN" in line for line in config("--hf-token", "t").warnings)
