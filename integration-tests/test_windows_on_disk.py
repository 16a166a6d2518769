"""Models with sliding windows whose prefixes outlive the engine core: tokens and log-probabilities keep their bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_runner_helpers import tiny_configs as tiny
from state_engine import build, run

from llmstack_engine_core import EngineCore
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, SamplingParams

VOCAB_SIZE, BLOCK_SIZE = 97, 4
BASE: dict[str, Any] = (
    tiny.LLAMA | tiny.NO_ENDS | {"head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2}
)
_GEMMA_4 = BASE | {
    "num_hidden_layers": 8, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 20,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": BASE
    | {"num_hidden_layers": 7, "sliding_window_pattern": 6, "sliding_window": 20, "query_pre_attn_scalar": 5},
    "GptOssForCausalLM": BASE
    | {"num_hidden_layers": 4, "sliding_window": 17, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma4ForCausalLM": _GEMMA_4,
    "MistralForCausalLM": BASE | {"sliding_window": 20},
}
TEXT = [(7 * place * place + 3 * place + 5) % VOCAB_SIZE for place in range(230)]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    model_class = getattr(transformers, request.param)
    model_class(model_class.config_class(**MODELS[request.param])).eval().save_pretrained(folder)
    return folder


class Cores:
    """Engine cores one after another over one folder."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        self.log = folder / "steps"

    def start(self, **changes: Any) -> EngineCore:
        self.log.unlink(missing_ok=True)
        on_disk = {"kv_cache_dir": str(self._folder / "cache"), "record_steps": str(self.log)}
        return build(self._checkpoint, block_size=BLOCK_SIZE, **on_disk | changes)

    def in_memory(self, *prompts: list[int], max_tokens: int = 12, **changes: Any) -> list[Any]:
        """The answers of an engine core without a disk, one after another."""
        core = build(self._checkpoint, block_size=BLOCK_SIZE, **changes)
        answers = [ask(core, prompt, max_tokens) for prompt in prompts]
        core.shutdown()
        return answers


@pytest.fixture
def cores(checkpoint: Path, tmp_path: Path) -> Cores:
    return Cores(checkpoint, tmp_path)


def ask(core: EngineCore, prompt: list[int], max_tokens: int = 12) -> Any:
    """The tokens of a greedy answer, and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, seed=0)
    (answer,) = run(core, EngineCoreRequest("ask", prompt, params)).values()
    return answer


def num_read(core: EngineCore) -> int:
    """Tokens that were read from disk so far."""
    disk = core.stats().disk
    assert disk is not None
    assert not any(disk.num_misses[1:])
    return disk.num_tokens


def tokens_of(answer: Any) -> list[int]:
    return [token_id for token_id, _ in answer]


def test_the_next_engine_core_goes_on_with_the_bits_of_a_hit_in_memory(cores: Cores) -> None:
    prompt = TEXT[:200]
    core = cores.start()
    first = ask(core, prompt)
    core.shutdown()
    core = cores.start(num_blocks=230)  # what its windows have passed would have no room
    found = ask(core, prompt)
    assert num_read(core) == 196
    core.shutdown()
    assert [first, found] == cores.in_memory(prompt, prompt)
    assert tokens_of(found) == tokens_of(first)
    assert verify(read_step_log(cores.log)).num_steps > 10


def test_the_next_turn_goes_on_from_prompt_and_answer(cores: Cores) -> None:
    core = cores.start()
    first = ask(core, TEXT[:120])
    core.shutdown()
    turn = [*TEXT[:120], *tokens_of(first), *TEXT[:30]]
    core = cores.start()
    found = ask(core, turn)
    assert num_read(core) == 128, "all whole blocks but that of the last token, which was not computed"
    core.shutdown()
    assert [first, found] == cores.in_memory(TEXT[:120], turn)
    assert [tokens_of(found)] == [tokens_of(one) for one in cores.in_memory(turn, enable_prefix_caching=False)]


def test_a_shorter_prompt_has_its_own_tokens(cores: Cores) -> None:
    """Of a long text the windows of its ends alone are kept, so that a shorter one is computed, or read to its end."""
    core = cores.start()
    ask(core, TEXT[:230])
    core.shutdown()
    prompts = [[*TEXT[:num_tokens], 1, 2, 3] for num_tokens in (200, 73)]
    core = cores.start()
    found = [tokens_of(ask(core, prompt)) for prompt in prompts]
    core.shutdown()
    assert found == [tokens_of(one) for one in cores.in_memory(*prompts, enable_prefix_caching=False)]


@pytest.mark.parametrize("seed", range(2))
def test_random_turns_over_restarts_have_the_tokens_of_an_engine_core_without_a_cache(cores: Cores, seed: int) -> None:
    """Turns extend earlier texts or a part of one. Their blocks are in memory, on disk, or nowhere."""
    draw, texts, num_found = random.Random(seed), [TEXT[:80]], 0
    for _ in range(4):
        core = cores.start(num_blocks=draw.choice([200, 300, 600]))
        for _ in range(4):
            text = draw.choice(texts)
            kept = text[: draw.choice([len(text), draw.randrange(1, len(text))])]
            prompt = [*kept, *(draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 40)))][:230]
            answer = tokens_of(ask(core, prompt, 6))
            (wanted,) = cores.in_memory(prompt, max_tokens=6, enable_prefix_caching=False)
            assert answer == tokens_of(wanted)
            texts.append(prompt + answer)
        disk = core.stats().disk
        assert disk is not None
        num_found += disk.num_tokens
        core.shutdown()
    assert num_found > 0
