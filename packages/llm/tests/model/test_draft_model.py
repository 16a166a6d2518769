"""Draft models: what a line says of one, and what the model runner gets of it."""

from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.engine_args import EngineArgs, EngineArgsError
from llmstack_llm.engine_options.speculation import check_speculative_config
from llmstack_llm.model.config import ModelConfigError
from llmstack_llm.testing import write_model_folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    for name in ("served", "draft"):
        (tmp_path / name).mkdir()
    return str(write_model_folder(tmp_path / "served")), str(write_model_folder(tmp_path / "draft"))


def test_a_model_alone_is_a_draft_model(folders: tuple[str, str]) -> None:
    served, draft = folders
    args = EngineArgs(served, speculative_config={"model": draft}, device="cpu")
    _, config = args.create_engine_config()
    assert config.scheduler.speculative is not None
    assert (config.scheduler.speculative.method, config.scheduler.speculative.model) == ("draft_model", draft)
    assert (config.scheduler.speculative.num_speculative_tokens, config.model.max_num_drafts) == (5, 5)
    assert (config.model.draft_model_path, config.model.draft_max_model_len) == (draft, config.model.max_model_len)


@pytest.mark.parametrize(("device", "is_adaptive"), [("cpu", True), ("cuda", False)])
def test_only_a_cpu_asks_whether_drafts_repay_their_cost(
    folders: tuple[str, str], device: str, is_adaptive: bool
) -> None:
    for given in ({}, {"is_adaptive": not is_adaptive}):
        drafts = {"model": folders[1], **given}
        _, config = EngineArgs(folders[0], speculative_config=drafts, device=device).create_engine_config()
        assert config.scheduler.speculative is not None
        assert config.scheduler.speculative.is_adaptive == given.get("is_adaptive", is_adaptive)


def test_its_options_are_those_of_vllm(folders: tuple[str, str]) -> None:
    drafts = {"model": folders[1], "max_model_len": 16, "draft_tensor_parallel_size": 1, "revision": None}
    checked = check_speculative_config(drafts)
    assert check_speculative_config(checked) == checked
    assert checked.items() >= drafts.items()
    _, config = EngineArgs(folders[0], speculative_config=drafts).create_engine_config()
    assert config.model.draft_max_model_len == 16


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1, got 2"),
        ({"quantization": "fp8"}, "quantization must be null"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"depth": 1}, "depth"),
        ({"method": "dspark"}, "drafts of the method 'dspark' are not supported yet"),
    ],
)
def test_what_it_cannot_be_is_one_sentence(given: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineArgsError, match=text) as caught:
        EngineArgs("served", speculative_config={"model": "draft", **given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_a_head_has_a_folder_and_no_tokenizer_or_vocabulary_of_its_own(
    method: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"model_type": "medusa", "num_heads": 3}')
    drafts = {"method": method, "model": str(tmp_path / "head"), "max_model_len": 16, "moe_backend": "triton"}
    _, config = EngineArgs(folders[0], speculative_config=drafts).create_engine_config()
    assert (config.model.draft_head, config.model.draft_model_path) == (method, str(tmp_path / "head"))
    assert (config.model.draft_max_model_len, config.model.max_num_drafts) == (16, 5)
    assert config.scheduler.speculative is not None
    assert config.scheduler.speculative.is_by_model


def test_a_head_is_no_draft_model(folders: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    other = write_model_folder(tmp_path / "head", config={"architectures": ["LlamaForCausalLMEagle3"]})
    with pytest.raises(ModelConfigError, match="is a draft head: set method to eagle, eagle3, medusa or dflash"):
        EngineArgs(folders[0], speculative_config={"model": str(other)}).create_engine_config()


@pytest.mark.parametrize(
    "method", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "nemotron_h_mtp", "qwen3_next_mtp", "qwen3_5_mtp"]
)
def test_a_layer_of_the_checkpoint_has_a_name_for_each_family(method: str, folders: tuple[str, str]) -> None:
    args = EngineArgs(folders[0], speculative_config={"method": method}, device="cuda")
    _, config = args.create_engine_config()
    assert config.scheduler.speculative is not None
    assert (config.scheduler.speculative.method, config.scheduler.speculative.num_speculative_tokens) == ("mtp", 1)
    assert (config.model.draft_head, config.model.draft_model_path, config.model.max_num_drafts) == ("mtp", "", 1)


def test_a_layer_of_the_checkpoint_may_name_the_served_model_alone(folders: tuple[str, str]) -> None:
    served, other = folders
    drafts = {"method": "mtp", "model": served}
    assert check_speculative_config(check_speculative_config(drafts)) == check_speculative_config(drafts)
    _, config = EngineArgs(served, speculative_config=drafts).create_engine_config()
    assert config.scheduler.speculative is not None
    assert (config.scheduler.speculative.model, config.model.draft_model_path) == ("", "")
    with pytest.raises(ModelConfigError, match=r"so model must be .*served or left out, and is .*draft"):
        EngineArgs(served, speculative_config={"method": "mtp", "model": other}).create_engine_config()


def test_a_layer_of_the_checkpoint_has_no_options_of_a_model() -> None:
    with pytest.raises(EngineArgsError, match="revision is that of a draft model; the method 'mtp' has none"):
        EngineArgs("served", speculative_config={"method": "mtp", "revision": "main"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"runner": "echo"}, "need a runner of llmstack"),
        ({"pipeline_parallel_size": 2}, "drafts need one stage"),
    ],
)
def test_what_it_does_not_go_with_is_refused(folders: tuple[str, str], options: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineArgsError, match=text):
        EngineArgs(folders[0], speculative_config={"model": folders[1]}, **options)


def test_another_vocabulary_is_refused_before_anything_is_loaded(folders: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_model_folder(tmp_path / "other", config={"vocab_size": 77})
    with pytest.raises(ModelConfigError, match="has a vocabulary of 77 tokens"):
        EngineArgs(folders[0], speculative_config={"model": str(other)}).create_engine_config()
