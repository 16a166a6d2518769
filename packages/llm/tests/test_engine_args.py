"""Options to configurations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.kv_transfer.config import TransferNetwork
from llmstack_llm.engine_args import EngineArgs, EngineArgsError, UsageContext
from llmstack_llm.media_door import MediaDoor
from llmstack_llm.options.option import options_of
from llmstack_llm.options.problem import OptionsError
from llmstack_llm.testing import write_model_folder
from llmstack_types import EngineReady, ModelRunnerConfig
from llmstack_types.options import declaration_of


def test_who_starts_the_engine_decides_the_token_budget(tmp_path: Path):
    args = EngineArgs(str(write_model_folder(tmp_path)))
    _, server = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    _, offline = args.create_engine_config(UsageContext.LLM_CLASS)
    assert (server.scheduler.max_num_batched_tokens, offline.scheduler.max_num_batched_tokens) == (2048, 8192)


@pytest.mark.parametrize(
    ("usage", "options", "expected"),
    [
        (UsageContext.OPENAI_API_SERVER, {"device": "cpu"}, 256),
        (UsageContext.OPENAI_API_SERVER, {"device": "cuda"}, 0),
        (UsageContext.OPENAI_API_SERVER, {"device": "cpu", "max_prefill_tokens": 0}, 0),
        (UsageContext.LLM_CLASS, {"device": "cpu"}, 0),
        (UsageContext.LLM_CLASS, {"device": "cpu", "max_prefill_tokens": 7}, 7),
    ],
)
def test_a_server_on_a_cpu_does_not_delay_first_tokens_for_many_prompts_in_a_step(
    usage: UsageContext, options: dict[str, Any], expected: int, tmp_path: Path
):
    args = EngineArgs(str(write_model_folder(tmp_path)), **options)
    assert args.create_engine_config(usage)[1].scheduler.max_prefill_tokens == expected
    assert args.prefill_tokens(usage) == expected


@pytest.mark.parametrize(
    ("usage", "options", "expected"),
    [
        (UsageContext.OPENAI_API_SERVER, {"device": "cpu"}, (0.0, 8.0)),
        (UsageContext.OPENAI_API_SERVER, {"device": "cpu", "max_itl_ms": 0}, (0.0, 0.0)),
        (UsageContext.OPENAI_API_SERVER, {"device": "cpu", "max_itl_ms": 40.0}, (40.0, 0.0)),
        (UsageContext.OPENAI_API_SERVER, {"device": "cpu", "enable_chunked_prefill": False}, (0.0, 0.0)),
        (UsageContext.OPENAI_API_SERVER, {"device": "cuda"}, (0.0, 0.0)),
        (UsageContext.LLM_CLASS, {"device": "cpu"}, (0.0, 0.0)),
    ],
)
def test_by_default_only_a_server_on_a_cpu_bounds_its_steps_beside_streams(
    usage: UsageContext, options: dict[str, Any], expected: tuple[float, float], tmp_path: Path
):
    scheduler = EngineArgs(str(write_model_folder(tmp_path)), **options).create_engine_config(usage)[1].scheduler
    assert (scheduler.max_itl_ms, scheduler.max_itl_steps) == expected


@pytest.mark.parametrize(
    ("given", "meant"),
    [("gptq_marlin", "gptq"), ("awq_marlin", "awq"), ("mxfp4", "mxfp4"), ("modelopt", "fp8"), ("fbgemm_fp8", "fp8")],
)
def test_a_format_of_checkpoints_is_named_with_the_names_of_vllm(given: str, meant: str, tmp_path: Path):
    args = EngineArgs(str(write_model_folder(tmp_path)), quantization=given)  # type: ignore[arg-type]  # an alias
    assert args.create_engine_config()[1].model.quantization == meant


def test_every_option_reaches_the_layer_it_is_for(tmp_path: Path):
    args = EngineArgs(
        str(write_model_folder(tmp_path)), dtype="half", seed=3, load_format="dummy", max_model_len=64, max_num_seqs=4,
        max_num_batched_tokens=32, block_size=8, num_gpu_blocks_override=99, gpu_memory_utilization=0.5,
        enable_prefix_caching=False, scheduling_policy="priority", long_prefill_token_threshold=5,
        disable_log_stats=True, runner="a:B", device="cpu", logprobs_mode="processed_logprobs",
        quantization="int4",
        logits_processors=["c:D", UsageContext],
    )  # fmt: skip
    model, engine = args.create_engine_config()
    assert (engine.model.dtype, engine.model.seed, engine.model.load_format) == ("float16", 3, "dummy")
    assert (engine.model.max_model_len, engine.scheduler.max_model_len, model.max_model_len) == (64, 64, 64)
    assert (engine.model.max_num_seqs, engine.scheduler.max_num_seqs) == (4, 4)
    assert (engine.model.block_size, engine.num_blocks, engine.model.gpu_memory_utilization) == (8, 99, 0.5)
    assert (engine.scheduler.policy, engine.scheduler.long_prefill_token_threshold) == ("priority", 5)
    assert (engine.enable_prefix_caching, engine.log_stats, engine.runner) == (False, False, "a:B")
    assert (engine.is_max_model_len_explicit, engine.model.device) == (True, "cpu")
    assert engine.model.logits_processors == ("c:D", "llmstack_llm.engine_args:UsageContext")
    assert (engine.model.logprobs_mode, engine.model.quantization) == ("processed_logprobs", "int4")


def test_options_about_requests_reach_the_front_end_and_those_of_the_model_the_runner(tmp_path: Path):
    args = EngineArgs(
        str(write_model_folder(tmp_path)), max_logprobs=5, stream_interval=4, hf_overrides={"n_positions": 32},
        override_generation_config={"top_k": 7},
    )  # fmt: skip
    model, engine = args.create_engine_config()
    assert (model.max_logprobs, model.max_model_len, engine.model.max_model_len) == (5, 32, 32)
    assert json.loads(engine.model.hf_overrides) == {"n_positions": 32}
    assert (model.default_sampling_params().stream_interval, model.default_sampling_params().top_k) == (4, 7)


def test_a_class_of_a_processor_that_no_name_finds_is_refused(tmp_path: Path):
    class Local: ...

    args = EngineArgs(str(write_model_folder(tmp_path)), logits_processors=[Local])
    with pytest.raises(EngineArgsError, match="logits_processors"):
        args.create_engine_config()


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt(tmp_path: Path):
    folder = write_model_folder(tmp_path, config={"n_positions": 4096})
    _, engine = EngineArgs(str(folder), enable_chunked_prefill=False).create_engine_config()
    assert engine.scheduler.max_num_batched_tokens == 4096


@pytest.mark.parametrize(("options", "names"), [
    ({"num_kv_blocks": 5, "num_gpu_blocks_override": 6}, ["num_kv_blocks", "num_gpu_blocks_override"]),
    ({"num_kv_blocks": 5, "kv_cache_memory_bytes": 6}, ["num_kv_blocks", "kv_cache_memory_bytes"]),
    ({"skip_tokenizer_init": True, "tokenizer": "x"}, ["skip_tokenizer_init", "tokenizer"]),
    ({"dtype": "int8"}, ["dtype", "bfloat16"]), ({"load_format": "pt"}, ["load_format", "safetensors"]),
    ({"max_num_seqs": 0}, ["max_num_seqs"]), ({"block_size": True}, ["block_size"]),
    ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization"]), ({"logprobs_mode": "x"}, ["logprobs_mode"]),
    ({"quantization": "quip"}, ["quantization", "int8", "int4"]),
    ({"max_logprobs": -2}, ["max_logprobs"]), ({"stream_interval": 0}, ["stream_interval"]),
    ({"max_num_queued_tokens": 0}, ["max_num_queued_tokens"]),
])  # fmt: skip
def test_a_wrong_option_or_combination_is_refused_naming_all_fields(options: dict[str, Any], names: list[str]):
    with pytest.raises(EngineArgsError) as caught:
        EngineArgs("model", **options)
    assert all(name in str(caught.value) for name in names)


def test_what_the_scheduler_refuses_names_both_fields_too(tmp_path: Path):
    args = EngineArgs(str(write_model_folder(tmp_path)), enable_chunked_prefill=False, max_num_batched_tokens=16)
    with pytest.raises(EngineArgsError, match=r"max_num_batched_tokens.*max_model_len"):
        args.create_engine_config()


def test_the_log_of_steps_is_named_for_a_process_that_may_stand_elsewhere(tmp_path: Path) -> None:
    folder = str(write_model_folder(tmp_path))
    _, engine = EngineArgs(folder, record_steps="run.steps").create_engine_config()
    assert engine.record_steps == str(Path.cwd() / "run.steps")
    assert EngineArgs(folder).create_engine_config()[1].record_steps is None


LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}


@pytest.mark.parametrize("given", [LOOKUP, json.dumps(LOOKUP)])
def test_speculation_is_configured_by_a_mapping_or_its_json(tmp_path: Path, given: Any) -> None:
    _, engine = EngineArgs(str(write_model_folder(tmp_path)), speculative_config=given).create_engine_config()
    speculative = engine.scheduler.speculative
    assert speculative is not None
    assert (speculative.method, speculative.prompt_lookup_max, speculative.prompt_lookup_min) == ("ngram", 4, 1)
    assert (speculative.num_speculative_tokens, engine.model.max_num_drafts) == (5, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "none"}},
        {"device": "cuda"},
        {"pipeline_parallel_size": 2},
        {"async_scheduling": True},
        {"runner": "echo"},
    ],
)
def test_drafts_are_the_default_of_a_cpu_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = str(write_model_folder(tmp_path))
    _, engine = EngineArgs(folder, **{"device": "cpu", **options}).create_engine_config()
    assert (engine.scheduler.speculative, engine.model.max_num_drafts, engine.model.max_num_logits) == (None, 0, 0)
    _, engine = EngineArgs(folder, device="cpu", max_num_seqs=8).create_engine_config()
    assert engine.scheduler.speculative is not None
    assert (engine.scheduler.speculative.is_adaptive, engine.model.max_num_logits) == (True, 32)


def test_a_checked_value_passes_its_check_again() -> None:
    """The command line checks a value, and so do the arguments that are made of it."""
    options = {option.name: option for option in options_of(EngineArgs)}
    texts = {name: option.declared.example for name, option in options.items() if option.declared.example}
    assert "speculative_config" in texts
    for name, text in [*texts.items(), ("speculative_config", '{"method": "none"}')]:
        value = options[name].from_text(text)
        assert options[name].from_keyword(value) == value, name


@pytest.mark.parametrize(("depth", "num_drafts"), [(None, 24), (12, 12), (100, 64)])
def test_drafts_by_suffixes_are_as_many_as_the_depth_allows(tmp_path: Path, depth: int | None, num_drafts: int) -> None:
    given = {"method": "suffix"} | ({} if depth is None else {"suffix_decoding_max_tree_depth": depth})
    args = EngineArgs(str(write_model_folder(tmp_path)), speculative_config=given, device="cpu")
    speculative = args.create_engine_config()[1].scheduler.speculative
    assert speculative is not None
    assert (speculative.num_speculative_tokens, speculative.is_adaptive) == (num_drafts, True)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("{", ["JSON"]),
        ("[]", ["JSON object"]),
        ({}, ["method"]),
        ({"method": "ngram"}, ["num_speculative_tokens"]),
        (LOOKUP | {"method": "dspark"}, ["method", "ngram", "dspark"]),
        (LOOKUP | {"method": "dflash"}, ["model", "dflash"]),
        (LOOKUP | {"method": "eagle3"}, ["model", "eagle3"]),
        (LOOKUP | {"model": "draft"}, ["model"]),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, ["suffix_decoding_min_token_prob"]),
        ({"method": "suffix", "revision": "main"}, ["revision", "suffix"]),
        (LOOKUP | {"num_speculative_tokens": "5"}, ["num_speculative_tokens", "int"]),
        (LOOKUP | {"prompt_lookup_max": 0}, ["prompt_lookup_max"]),
    ],
)
def test_a_speculation_that_cannot_be_is_one_sentence(tmp_path: Path, given: Any, names: list[str]) -> None:
    with pytest.raises(EngineArgsError, match=r"^speculative_config: ") as caught:
        EngineArgs(str(tmp_path), speculative_config=given)
    assert all(name in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)


def test_options_of_a_gpu_reach_the_model_runner(tmp_path: Path) -> None:
    args = EngineArgs(
        str(write_model_folder(tmp_path)),
        kv_cache_dtype="fp8",
        cudagraph_capture_sizes=[8, 1, 8],
        enable_deterministic_inference=True,
    )
    model = args.create_engine_config()[1].model
    assert (model.kv_cache_dtype, model.cuda_graph_sizes, model.enable_deterministic_inference) == ("fp8", (1, 8), True)


def test_swap_space_becomes_bytes_of_the_host(tmp_path: Path) -> None:
    folder = str(write_model_folder(tmp_path))
    assert EngineArgs(folder, swap_space=0.5).create_engine_config()[1].host_kv_bytes == 2**29
    for wrong in ({"swap_space": -1}, {"swap_space": float("nan")}, {"swap_space": 1, "num_host_blocks": 2}):
        with pytest.raises(EngineArgsError, match="swap_space"):
            EngineArgs(folder, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"kv_cache_dtype": "int8"}, {"cudagraph_capture_sizes": [4, 0]}, {"cudagraph_capture_sizes": ["4"]}]
)
def test_options_of_a_gpu_that_cannot_be_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineArgsError, match=next(iter(wrong))):
        EngineArgs("model", **wrong)


def test_scheduling_ahead_and_drafts_exclude_each_other(tmp_path: Path) -> None:
    args = EngineArgs(str(write_model_folder(tmp_path)), speculative_config=LOOKUP, async_scheduling=True)
    with pytest.raises(EngineArgsError, match=r"async_scheduling and speculative"):
        args.create_engine_config()


def test_cache_events_are_configured_with_vllms_fields_and_stay_on_this_machine_without_keys(tmp_path: Path) -> None:
    model = str(write_model_folder(tmp_path))
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://192.0.2.1:5557", "topic": "kv"}
    local = {**events, "endpoint": "tcp://127.0.0.1:5557"}
    _, engine = EngineArgs(model, kv_events_config=local).create_engine_config()
    assert engine.kv_events is not None
    assert (engine.kv_events.is_on, engine.kv_events.topic) == (True, "kv")
    with pytest.raises(
        EngineArgsError, match=r"reach tcp://192\.0\.2\.1:5557, and events are prompt text; give engine_key_file"
    ):
        EngineArgs(model, kv_events_config=events)
    assert EngineArgs(model, kv_events_config=events, engine_key_file="keys").kv_events_config
    for wrong, expected in (
        ({"hwm": "many"}, "hwm"),
        ({"endpont": ""}, "endpont"),
        ({"data_parallel_rank": 1}, "rank"),
    ):
        with pytest.raises(EngineArgsError, match=rf"^kv_events_config: .*{expected}"):
            EngineArgs(model, kv_events_config=wrong)


def test_kv_transfers_are_configured_by_vllms_names(tmp_path: Path):
    model = str(write_model_folder(tmp_path))
    given = {
        "kv_connector": "SharedMemoryConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"max_exports": 3},
    }
    _, engine = EngineArgs(model, kv_transfer_config=given).create_engine_config()
    assert engine.kv_transfer is not None
    assert (engine.kv_transfer.kv_role, engine.kv_transfer.kv_connector_extra_config.max_exports) == ("kv_producer", 3)
    assert engine.model.digest_weight_content
    args = EngineArgs(
        model, kv_transfer_config={"kv_connector": "NixlConnector"}, cluster_key_file="/key", trust_cluster_network="lo"
    )
    _, engine = args.create_engine_config()
    assert engine.kv_transfer_network == TransferNetwork("lo", "/key")
    for wrong, expected in (
        *(({"kv_connector": name}, f"'{name}' is not supported") for name in (
            "LMCacheConnectorV1", "P2pNcclConnector", "MooncakeConnector", "MultiConnector",
        )),
        ({}, "kv_connector"),
        ({**given, "kv_role": "both"}, "kv_producer, kv_consumer, kv_both"),
        ({**given, "kv_ip": "127.0.0.1"}, "kv_ip"),
        ({**given, "kv_load_failure_policy": "fail"}, "recompute"),
        ({**given, "kv_connector_extra_config": {"time_to_live_s": 0}}, "time_to_live_s"),
    ):  # fmt: skip
        with pytest.raises(EngineArgsError, match=rf"^kv_transfer_config: .*{expected}"):
            EngineArgs(model, kv_transfer_config=wrong)
    between_hosts = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    for fields, sentence in (
        ({"enable_prefix_caching": False}, "needs"),
        ({**between_hosts, "cluster_key_file": "key"}, "NixlConnector needs trust_cluster_network"),
        ({**between_hosts, "trust_cluster_network": "lo"}, "NixlConnector needs cluster_key_file"),
    ):
        with pytest.raises(OptionsError, match=sentence):
            EngineArgs("m", **{"kv_transfer_config": given, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_engine_restarts": 0}, "needs max_engine_restarts"),
        ({"tensor_parallel_size": 2}, "the ranks of a spare"),
        ({"record_steps": "steps"}, "two processes would write one file"),
        ({"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"}}, "two processes would publish"),
        ({"kv_cache_dir": "cache"}, "two processes would use one folder"),
        ({"device": "cuda"}, "the weights would be there twice"),
    ],
)
def test_a_warm_spare_is_refused_where_it_cannot_serve(fields: dict[str, Any], sentence: str):
    with pytest.raises(OptionsError, match=sentence):
        EngineArgs("m", warm_spare=True, **({"max_engine_restarts": 1} | fields))


def test_packed_weights_are_kept_unless_that_is_switched_off(tmp_path: Path):
    model = str(write_model_folder(tmp_path))
    chosen = [EngineArgs(model, pack_cache=value).create_engine_config()[1].model.pack_cache for value in (True, False)]
    assert (EngineArgs(model).pack_cache, chosen) == (True, [True, False])


@pytest.mark.parametrize(
    ("options", "num_warnings"),
    [({}, 1), ({"language_model_only": True}, 0), ({"limit_mm_per_prompt": {"image": 0}}, 0),
     ({"limit_mm_per_prompt": {"image": 2}}, 1)],
)  # fmt: skip
def test_a_model_with_vision_serves_its_text_and_warns_unless_that_is_meant(
    options: dict[str, Any], num_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    text = {"model_type": "llama", "hidden_size": 64, "vocab_size": 257, "max_position_embeddings": 128}
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "text_config": text}
    args = EngineArgs(str(write_model_folder(tmp_path, config=config)), **options)
    model_config, _ = args.create_engine_config()
    assert (model_config.architecture, model_config.max_model_len) == ("LlamaForCausalLM", 128)
    door = MediaDoor(model_config.path, args.media_options(model_config))
    door.set_ready(EngineReady(64, 16, 128, 257, "float32", "cpu"))
    assert door.processor is None
    assert caplog.text.count("LlavaForConditionalGeneration: only its text is served") == num_warnings


# Fields that mean something else than the option of their name.
OTHERS = {
    "model": "a configuration, not a name",
    "runner": "the class that runs, not what is offered",
    "max_model_len": "a number that is known",
    "max_num_batched_tokens": "a number that is known",
    "max_prefill_tokens": "a number that is known",
    "max_itl_ms": "a number that is known",
    "max_cpu_loras": "a number that is known",
    "max_loras": "0 where there are no adapters",
    "logits_processors": "names, not classes",
    "hf_overrides": "its JSON",
    "log_level": "the word of the library of logs",
    "pack_cache": "a runner writes no files unless a program asks for it",
}


@pytest.mark.parametrize("config", [ModelRunnerConfig, SchedulerConfig, EngineConfig])
def test_an_option_is_declared_once(config: type) -> None:
    options = {option.name: declaration_of(option) for option in dataclasses.fields(EngineArgs)}
    shared = {field.name: declaration_of(field) for field in dataclasses.fields(config) if field.name in options}
    own = options.keys() & vars(config)["__annotations__"].keys()
    assert own <= OTHERS.keys()
    assert len(shared.keys() - own) >= 9
    assert all(shared[name] is options[name] for name in shared.keys() - own)


def test_an_option_that_has_the_name_of_a_field_needs_no_other_line(tmp_path: Path) -> None:
    folder = str(write_model_folder(tmp_path))
    values: dict[str, Any] = {
        "long_prefill_token_threshold": 7,
        "step_log_bytes": 12345,
        "max_lora_bytes": 54321,
        "snapshot_steps": 77,
    }
    _, config = EngineArgs(folder, **values).create_engine_config()
    assert config.scheduler.long_prefill_token_threshold == 7
    assert (config.step_log_bytes, config.snapshot_steps, config.model.max_lora_bytes) == (12345, 77, 54321)
