"""Where the match of a prompt with the prefix cache ended, in logs whose causes are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, EngineCore, build_engine_core
from llmstack_insight.explain import Explanation, add_prefix_match, explain
from llmstack_insight.explain.prefixes import MAX_CHARACTERS, TextOf
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_step_log import read_step_log
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

LIMITS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SYSTEM = list(range(10, 26))  # four blocks


class Recorded:
    def __init__(self, path: Path, num_blocks: int = 64, **settings: int) -> None:
        config = EngineConfig(
            ModelRunnerConfig("echo", block_size=4, **LIMITS), runner="echo",
            scheduler=SchedulerConfig(**LIMITS, **settings), num_blocks=num_blocks, record_steps=str(path),
        )  # fmt: skip
        self.path = path
        self.core: EngineCore = build_engine_core(config)

    def run(self, name: str, token_ids: list[int], max_tokens: int = 2, **values: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(EngineCoreRequest(name, token_ids, params, **values))
        while self.core.has_unfinished_requests():
            self.core.step()

    def explained(self, name: str, max_steps: int = 1_000, text_of: TextOf | None = None) -> Explanation:
        self.core.shutdown()
        run = read_step_log(self.path)
        log = steps_of_log(run, max_steps)
        made = explain(log, name)
        add_prefix_match(made, run, log, run.header.configs()[1], text_of)
        return made


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "steps.log")


def match_of(made: Explanation) -> str:
    """The sentence after the one on how much was found."""
    position = next(i for i, one in enumerate(made.sentences) if one.startswith("The prefix cache held"))
    return made.sentences[position + 1]


def test_the_match_ends_where_the_prompts_part(recorded: Recorded) -> None:
    recorded.run("other", [*SYSTEM[:6], *range(70, 80)])
    recorded.run("before", [*SYSTEM[:10], *range(90, 96)])
    recorded.run("r", SYSTEM)
    made = recorded.explained("r")
    assert (made.facts["cached_tokens"], made.facts["parts_at"], made.facts["parted_from"]) == (8, 10, "before")
    assert match_of(made) == "The match ended where its prompt parts from that of before, at token 10."


def test_a_first_token_that_differs_shares_nothing(recorded: Recorded) -> None:
    recorded.run("before", [1, *SYSTEM])
    recorded.run("r", [2, *SYSTEM])
    assert match_of(recorded.explained("r")).startswith("No earlier prompt has the same first 4 tokens")


def test_another_salt_is_another_prompt(recorded: Recorded) -> None:
    recorded.run("before", SYSTEM, cache_salt="theirs")
    recorded.run("r", SYSTEM)
    made = recorded.explained("r")
    assert "before" not in " ".join(made.sentences)
    assert "parted_from" not in made.facts


def test_an_evicted_prefix_names_both_requests(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log", num_blocks=8)
    recorded.run("before", [*SYSTEM, 1])
    recorded.run("taker", list(range(100, 128)))
    recorded.run("r", [*SYSTEM, 1])
    made = recorded.explained("r")
    assert made.facts["cached_tokens"] < 16
    assert (made.facts["shared_with"], made.facts["shared_tokens"]) == ("before", 17)
    assert made.facts["evicted_for"] == "taker"
    sentence = match_of(made)
    assert sentence.startswith("Its first 17 tokens are also those of before: the next block of these was evicted ")
    assert sentence.endswith(" before it began, for taker.")


def test_an_eviction_before_the_kept_steps_is_no_guess(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log", num_blocks=8)
    recorded.run("before", [*SYSTEM, 1])
    recorded.run("taker", list(range(100, 128)))
    recorded.run("r", [*SYSTEM, 1])
    made = recorded.explained("r", max_steps=2)
    assert match_of(made) == "Its first 17 tokens are also those of before, whose blocks were gone."
    assert "evicted_for" not in made.facts


def test_a_block_that_others_found_was_not_evicted_for_them(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log", num_blocks=8)
    recorded.run("before", [*SYSTEM, 1])
    recorded.run("finder", [*SYSTEM, 2])
    recorded.run("taker", list(range(100, 128)))
    recorded.run("r", [*SYSTEM, 1])
    assert recorded.explained("r").facts["evicted_for"] == "taker"


def test_a_prompt_that_was_found_whole_needs_no_sentence(recorded: Recorded) -> None:
    recorded.run("before", SYSTEM)
    recorded.run("r", SYSTEM)
    made = recorded.explained("r")
    assert made.facts["cached_tokens"] == 12
    assert "The rest of its prompt" in match_of(made)


def test_a_short_prompt_is_known_as_a_session_only_if_it_has_a_name(recorded: Recorded) -> None:
    recorded.run("before", SYSTEM, session="chat")
    recorded.run("r", SYSTEM, session="chat")
    made = recorded.explained("r")
    assert match_of(made).endswith("100 % of the 12 tokens of that were found.")
    assert "The rest of its prompt" in made.sentences[made.sentences.index(match_of(made)) + 1]


def test_a_prompt_that_is_still_computed_is_no_eviction(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log", long_prefill_token_threshold=8)
    for name in ("before", "r"):
        recorded.core.add_request(EngineCoreRequest(name, SYSTEM, SamplingParams(max_tokens=2, ignore_eos=True)))
    while recorded.core.has_unfinished_requests():
        recorded.core.step()
    assert match_of(recorded.explained("r")).endswith("those of before, which had not computed the next block yet.")


def words(token_ids: Sequence[int]) -> str:
    return "".join(f" w{token_id}" for token_id in token_ids)


def test_text_is_shown_only_if_it_is_asked_for(recorded: Recorded) -> None:
    recorded.run("before", [*SYSTEM[:10], *range(90, 96)])
    recorded.run("r", SYSTEM)
    made = recorded.explained("r")
    assert not {"text_before", "own_token", "own_text", "other_token", "other_text"} & made.facts.keys()
    made = recorded.explained("r", text_of=words)
    assert match_of(made).endswith(
        "After ' w12 w13 w14 w15 w16 w17 w18 w19' it has token 20, ' w20', and before has token 90, ' w90'."
    )
    assert (made.facts["own_token"], made.facts["other_token"], made.facts["other_text"]) == (20, 90, " w90")


def test_the_text_of_another_key_is_never_shown(recorded: Recorded) -> None:
    recorded.run("before", [*SYSTEM[:10], *range(90, 96)], tenant="theirs")
    recorded.run("r", SYSTEM, tenant="own")
    made = recorded.explained("r", text_of=words)
    assert match_of(made).endswith("it has token 20, ' w20'; the other prompt is of another key, and is not shown.")
    assert not {"other_token", "other_text"} & made.facts.keys()
    assert "90" not in match_of(made)


def test_a_prompt_that_ends_where_the_other_goes_on_has_no_token_there(recorded: Recorded) -> None:
    recorded.run("before", SYSTEM[:10])
    recorded.run("r", SYSTEM)
    made = recorded.explained("r", text_of=words)
    assert match_of(made).endswith("it has token 20, ' w20', and before has its end.")
    assert "other_token" not in made.facts


def test_shown_text_is_bounded_and_has_no_control_characters(recorded: Recorded) -> None:
    recorded.run("before", [*SYSTEM[:10], *range(90, 96)])
    recorded.run("r", SYSTEM)
    made = recorded.explained("r", text_of=lambda token_ids: "\x1b[2J\u202e" * 1_000)
    assert match_of(made).isprintable()
    assert len(made.facts["text_before"]) == len(made.facts["other_text"]) == MAX_CHARACTERS
