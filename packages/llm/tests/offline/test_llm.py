"""Offline use, over an engine core in this process and over one of its own."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from llmstack_llm import LLM, BeamSearchParams, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from llmstack_llm.engine_args import EngineArgsError
from llmstack_llm.testing import write_model_folder
from llmstack_types import EngineCoreOutput, EngineCoreOutputs, FinishReason, InvalidRequestError

ECHO: dict[str, Any] = {"runner": "llmstack_engine_core.testing:EchoModelRunner", "num_kv_blocks": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "m", generation_config={"eos_token_id": 256, "temperature": 0.5})


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ECHO) as made:
        yield made


def texts(llm: LLM, *args: Any, **options: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(*args, use_tqdm=False, **options)]


def test_outputs_are_in_the_order_of_the_prompts_however_long_each_takes(llm: LLM):
    params = [SamplingParams(max_tokens=20 - index) for index in range(10)]
    prompts = [f"<{index}>" for index in range(10)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20 - index for index in range(10)]


def test_requests_are_numbered_from_zero(llm: LLM):
    assert [output.request_id for output in llm.generate(["a", "b"], use_tqdm=False)] == ["0", "1"]
    assert [output.request_id for output in llm.generate("c", use_tqdm=False)] == ["2"]


def test_prompts_come_in_every_form(llm: LLM):
    ids = llm.get_tokenizer().encode("abc")
    params = SamplingParams(max_tokens=3)
    for prompts in ("abc", ids, [ids], ["abc"], {"prompt": "abc"}, [{"prompt_token_ids": ids}]):
        assert texts(llm, prompts, params) == ["abc"]
    assert llm.generate([], use_tqdm=False) == []


def test_the_defaults_are_those_of_the_model(llm: LLM):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.5, 16)
    assert len(llm.generate("ab", use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_a_default_output_length_is_cut_to_the_context_and_an_explicit_one_refused(llm: LLM):
    assert len(llm.generate("x" * 120, SamplingParams(), use_tqdm=False)[0].outputs[0].token_ids) == 8
    with pytest.raises(InvalidRequestError):
        llm.generate("x" * 120, SamplingParams(max_tokens=17), use_tqdm=False)


def test_a_bad_prompt_is_refused_by_its_place_before_anything_is_computed(llm: LLM):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["good", [1, 300]], use_tqdm=False)
    assert caught.value.param == "prompts[1][1]"
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(InvalidRequestError):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


@pytest.mark.parametrize("seed", [2**70, -(2**70)])
def test_a_seed_out_of_range_is_a_sentence(llm: LLM, seed: int):
    with pytest.raises(InvalidRequestError, match=r"Invalid 'seed': .* instead\.$"):
        llm.generate("a", SamplingParams(seed=seed))
    with pytest.raises(InvalidRequestError, match=r"Invalid 'seed': .* instead\.$"):
        llm.enqueue("a", SamplingParams(seed=seed))


def test_the_engine_has_the_tokenizer_too(llm: LLM):
    tokenizer = llm.llm_engine.get_tokenizer()
    assert tokenizer.encode("Hello") == llm.get_tokenizer().encode("Hello")
    assert tokenizer("Hello") == llm.get_tokenizer()("Hello")
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages) == llm.get_tokenizer().apply_chat_template(messages)


def test_the_metrics_have_the_served_name(folder: Path):
    with LLM(str(folder), served_model_name=["mine", "other"], **ECHO) as named:
        named.generate("a", SamplingParams(max_tokens=1))
        assert {metric.labels["model_name"] for metric in named.get_metrics()} == {"mine"}


def test_the_bar_counts_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")  # some versions cut the line off at the width of a terminal
    file = io.StringIO()
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=2, n=2), use_tqdm=partial(tqdm, file=file))
    assert "3/3" in file.getvalue()
    assert "toks/s" in file.getvalue()


def test_one_conversation_or_many(llm: LLM):
    params = SamplingParams(max_tokens=2)
    one = [{"role": "user", "content": "Hi"}]
    assert [output.outputs[0].text for output in llm.chat(one, params, use_tqdm=False)] == ["Hi"]
    assert [output.outputs[0].text for output in llm.chat([one, one], params, use_tqdm=False)] == ["Hi", "Hi"]
    own = llm.chat(
        one,
        params,
        use_tqdm=False,
        chat_template="{{ shout }}{{ messages[0].content }}",
        chat_template_kwargs={"shout": "X"},
    )
    assert own[0].prompt == "XHi"


def test_the_same_script_draws_the_same_seeds_again(folder: Path):
    seeds = []
    for seed in (0, 0, 1):
        with LLM(str(folder), seed=seed, **ECHO) as llm:
            processor = llm.llm_engine.input_processor
            sampling = processor.check_params(SamplingParams())
            seeds.append([processor.admit("a", sampling).sampling_params.seed for _ in range(3)])
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 3


def test_an_interruption_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    original, calls = llm.llm_engine.step, iter(range(100))

    def step() -> list[Any]:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return original()

    monkeypatch.setattr(llm.llm_engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
    monkeypatch.undo()
    llm.llm_engine.step()
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm, "ok", SamplingParams(max_tokens=2)) == ["ok"]


def test_the_same_over_a_process_of_its_own(folder: Path):
    with LLM(str(folder), multiprocess=True, **ECHO) as llm:
        assert texts(llm, ["abc", "de"], SamplingParams(max_tokens=4)) == ["abca", "dede"]
        assert llm.reset_prefix_cache()


def test_without_a_tokenizer_ids_go_in_and_ids_come_out(folder: Path):
    with LLM(str(folder), skip_tokenizer_init=True, **ECHO) as llm:
        (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [5, 6, 5])
        with pytest.raises(InvalidRequestError):
            llm.generate("text", use_tqdm=False)
        with pytest.raises(InvalidRequestError):
            llm.get_tokenizer()


def test_closing_twice_is_fine_and_an_object_that_never_came_to_be_can_be_deleted(folder: Path):
    llm = LLM(str(folder), **ECHO)
    llm.close()
    llm.close()
    LLM.__new__(LLM).__del__()


def test_an_unknown_option_is_refused_by_its_name(folder: Path):
    with pytest.raises(EngineArgsError, match="tensor_paralel_size"):
        LLM(str(folder), tensor_paralel_size=2)


def test_options_that_ask_for_nothing_beyond_what_is_there_are_accepted(folder: Path):
    with LLM(str(folder), **ECHO, tensor_parallel_size=1, trust_remote_code=False, enforce_eager=True) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_the_engine_can_be_stepped_by_hand(folder: Path):
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder), **ECHO))
    engine.add_request("a", "ab", SamplingParams(max_tokens=2))
    engine.add_request("b", "cd", SamplingParams(max_tokens=50))
    seen = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.append((output.request_id, output.outputs[0].text))
            if output.request_id == "a" and output.finished:
                engine.abort_request("b")
    assert ("a", "a") in seen
    assert ("a", "ab") in seen
    assert engine.step() == []
    engine.shutdown()


def test_a_request_that_fails_in_the_engine_is_returned_as_an_error_and_the_others_complete(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    original = llm.llm_engine.client.get_outputs

    def get_outputs() -> EngineCoreOutputs:
        failed = EngineCoreOutput("0", [], finish_reason=FinishReason.ERROR, error="made up")
        outputs = [failed if output.request_id == "0" else output for output in original().outputs]
        return EngineCoreOutputs(outputs)

    monkeypatch.setattr(llm.llm_engine.client, "get_outputs", get_outputs)
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


def test_a_beam_search_returns_the_prompt_with_each_of_its_best_continuations(llm: LLM):
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    for prompt in ("abc", llm.get_tokenizer().encode("abc")):
        [output] = llm.beam_search([prompt], params)
        assert len(output.sequences) == 2
        for sequence in output.sequences:
            assert sequence.tokens[:3] == llm.get_tokenizer().encode("abc")
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
            assert len(sequence.tokens) == 6
            assert len(sequence.logprobs) == 3
            assert sequence.finish_reason == "length"
        assert output.sequences[0].cum_logprob >= output.sequences[1].cum_logprob


def test_a_bad_beam_search_is_refused_under_its_own_names(llm: LLM):
    with pytest.raises(InvalidRequestError) as caught:
        llm.beam_search("a", BeamSearchParams(beam_width=0, max_tokens=3))
    assert caught.value.param == "beam_width"
    with pytest.raises(InvalidRequestError) as caught:
        llm.beam_search("x" * 120, BeamSearchParams(beam_width=1, max_tokens=16))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_model_sleeps_refuses_and_says_the_same_when_awake(folder: Path, multiprocess: bool):
    with LLM(str(folder), multiprocess=multiprocess, **ECHO) as llm:
        before = texts(llm, ["abc", "de"])
        for level in (1, 2):
            assert llm.sleep(level)
            if multiprocess:  # there the engine core refuses with an output
                assert llm.generate("abc", use_tqdm=False)[0].outputs[0].finish_reason == "error"
                continue
            with pytest.raises(InvalidRequestError, match="asleep"):
                llm.generate("abc", use_tqdm=False)
        llm.wake_up(tags=["weights", "kv_cache"])
        assert texts(llm, ["abc", "de"]) == before


def test_levels_and_tags_that_do_not_exist_are_refused(llm: LLM):
    with pytest.raises(InvalidRequestError, match="level must be 1 or 2"):
        llm.sleep(3)
    with pytest.raises(EngineArgsError, match="tags: expected kv_cache or weights"):
        llm.wake_up(tags=["weight"])


def test_parts_wake_one_after_the_other(folder: Path):
    with LLM(str(folder), enable_sleep_mode=True, **ECHO) as llm:
        assert llm.model_config.max_model_len == llm.llm_engine.model_config.max_model_len
        before = texts(llm, ["abc", "de"])
        for level, parts in ((2, ["weights", "kv_cache"]), (2, ["kv_cache", "weights"]), (1, ["kv_cache"])):
            assert llm.sleep(level)
            for part in parts:
                with pytest.raises(InvalidRequestError, match="asleep"):
                    llm.generate("abc", use_tqdm=False)
                llm.wake_up(tags=[part])
            assert texts(llm, ["abc", "de"]) == before


def test_several_engine_cores_are_for_servers(folder: Path):
    with pytest.raises(EngineArgsError, match="data_parallel_size"):
        LLM(str(folder), data_parallel_size=2, **ECHO)


def test_what_is_queued_is_computed_when_it_is_waited_for_and_in_the_order_of_queueing(llm: LLM):
    first = llm.enqueue(["aaa", "b"], [SamplingParams(max_tokens=9), SamplingParams(max_tokens=1)])
    second = llm.enqueue_chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=2))
    assert texts(llm, "between", SamplingParams(max_tokens=3)) == ["bet"]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 2]
    assert outputs[2].outputs[0].text == "Hi"
    assert llm.wait_for_completion() == []
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("method", ["chat", "enqueue_chat"])
def test_an_unknown_option_of_a_chat_is_refused(llm: LLM, method: str):
    with pytest.raises(TypeError, match="documents"):
        getattr(llm, method)([{"role": "user", "content": "Hi"}], documents=[])


def test_a_queued_request_that_ends_during_another_call_is_kept(llm: LLM):
    (request_id,) = llm.enqueue("a", SamplingParams(max_tokens=1))
    llm.generate("long", SamplingParams(max_tokens=20), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == [request_id]


def test_a_bad_prompt_leaves_nothing_in_the_queue(llm: LLM):
    with pytest.raises(InvalidRequestError):
        llm.enqueue(["good", [1, 300]])
    assert llm.wait_for_completion() == []


def test_an_interrupted_wait_leaves_nothing_behind(llm: LLM):
    def interrupt(**_: Any) -> tqdm[Any]:
        raise KeyboardInterrupt

    llm.enqueue(["a", "b"])
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=interrupt)
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert texts(llm, "cd", SamplingParams(max_tokens=2)) == ["cd"]


def test_priorities_decide_who_goes_first(folder: Path):
    with LLM(str(folder), scheduling_policy="priority", max_num_seqs=1, **ECHO) as llm:
        outputs = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3), priority=[2, 1, 0], use_tqdm=False)
        times = [output.metrics.last_token_time_s or 0.0 for output in outputs if output.metrics is not None]
        assert times == sorted(times, reverse=True)
        for wrong, param in (([1], "priority"), ([0, 1, 2**31], "priority[2]"), ([0, 1, True], "priority[2]")):
            with pytest.raises(InvalidRequestError) as caught:
                llm.generate(["a", "b", "c"], priority=wrong, use_tqdm=False)
            assert caught.value.param == param


def write_adapter(folder: Path, text: str = "{}") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(text)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)


@pytest.mark.parametrize("multiprocess", [False, pytest.param(True, marks=pytest.mark.full)])
def test_prompts_have_the_adapters_they_name(folder: Path, tmp_path: Path, multiprocess: bool):
    style = LoRARequest("style", 1, write_adapter(tmp_path / "style"))
    params = SamplingParams(max_tokens=3)
    with LLM(str(folder), enable_lora=True, multiprocess=multiprocess, **ECHO) as llm:
        adapted, plain = llm.generate(["abc", "abc"], params, lora_request=[style, None], use_tqdm=False)
        assert (adapted.outputs[0].text, plain.outputs[0].text) == ("bca", "abc")
        assert adapted.lora_request == LoRARequest("style", lora_path=style.lora_path)
        assert plain.lora_request is None
        assert [one.outputs[0].lora_request for one in (adapted, plain)] == [adapted.lora_request, None]
        assert texts(llm, "abc", params, lora_request=LoRARequest("other", 2, style.lora_path)) == ["bca"]
        known = llm.llm_engine.adapters.find("style")
        assert texts(llm, "abc", params, lora_request=style) == ["bca"]
        assert llm.llm_engine.adapters.find("style") is known
        write_adapter(tmp_path / "style", "{ }")
        assert texts(llm, "abc", params, lora_request=style) == ["bca"]
        assert llm.llm_engine.adapters.find("style") is not known


def test_adapters_that_cannot_be_served_are_refused(llm: LLM, folder: Path, tmp_path: Path):
    path = write_adapter(tmp_path / "style")
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("a", lora_request=LoRARequest("style", 1, path))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "lora_name")
    with LLM(str(folder), enable_lora=True, **ECHO) as enabled:
        for wrong, param in (
            (LoRARequest("a/b", 1, path), "lora_name"),
            (LoRARequest("style", 1, str(tmp_path / "missing")), "lora_path"),
            ([LoRARequest("style", 1, path)] * 2, "lora_request"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                enabled.generate("a", lora_request=wrong)
            assert caught.value.param == param


@pytest.mark.parametrize("name", ["collective_rpc", "apply_model", "reward", "set_tokenizer"])
def test_what_is_not_offered_says_why(llm: LLM, name: str):
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"{name}': .*"):
        getattr(llm, name)


def test_profiles_need_a_folder(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(EngineArgsError, match="Profiles are not enabled"):
        llm.start_profile()
    assert llm.stop_profile() == []
    monkeypatch.chdir(tmp_path)
    args = EngineArgs("m", profiler_config={"profiler": "torch", "torch_profiler_dir": "traces"})
    assert args.profiler_config is not None
    assert args.profiler_config["torch_profiler_dir"] == str(tmp_path / "traces")
