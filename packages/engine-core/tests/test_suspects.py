"""The request that crashes an engine core is found, and no other request is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core.client.suspects import NUM_CLEARING_TOKENS, AfterCrash, Suspects

MAX_NUM_DEATHS = 200


class Engine:
    """Crashes at the step after any of the killers was added; otherwise returns a token for each request."""

    def __init__(self, killers: set[str]) -> None:
        self.killers = killers
        self.running: list[str] = []
        self.num_deaths = 0

    def dies(self) -> bool:
        return any(one in self.killers for one in self.running)


def serve(names: list[str], killers: set[str], *, newcomers: list[str]) -> tuple[list[str], list[str], int]:
    """Served requests, quarantined ones, and the number of crashes; newcomers arrive after the first."""
    suspects, engine = Suspects(), Engine(killers)
    engine.running = list(names)
    served: list[str] = []
    quarantined: list[str] = []
    while engine.running:
        if engine.dies():
            engine.num_deaths += 1
            after = suspects.on_crash(engine.running)
            engine.running = list(after.resumed)
            quarantined += [] if after.quarantined is None else [after.quarantined]
            for newcomer in newcomers:
                if suspects.is_searching:
                    suspects.hold(newcomer)
                else:
                    engine.running.append(newcomer)
            newcomers = []
        else:
            done, engine.running = engine.running, []
            served += done
            for one in done:
                engine.running += suspects.forget([one])
        assert engine.num_deaths < MAX_NUM_DEATHS
    assert suspects.release_newcomers() == []
    return served, quarantined, engine.num_deaths


NAMES = st.integers(1, 40).map(lambda count: [f"r{index}" for index in range(count)])


@given(NAMES, st.data())
def test_killers_are_quarantined_and_all_others_served(names: list[str], data: st.DataObject) -> None:
    newcomers = [f"n{index}" for index in range(data.draw(st.integers(0, 3)))]
    killers = data.draw(st.sets(st.sampled_from(names + newcomers), max_size=3))
    served, quarantined, _ = serve(names, killers, newcomers=newcomers if killers & set(names) else [])
    known = names + (newcomers if killers & set(names) else [])
    assert sorted(quarantined) == sorted(killers & set(known))
    assert sorted(served) == sorted(set(known) - killers)


@given(NAMES, st.data())
def test_one_killer_costs_a_logarithm_of_deaths(names: list[str], data: st.DataObject) -> None:
    killer = data.draw(st.sampled_from(names))
    _, _, num_deaths = serve(names, {killer}, newcomers=[])
    assert num_deaths <= (len(names) - 1).bit_length() + 3


def test_one_crash_makes_no_request_a_suspect() -> None:
    suspects = Suspects()
    assert suspects.on_crash(["a", "b"]).resumed == ["a", "b"]
    assert suspects.on_tokens("a", NUM_CLEARING_TOKENS) == suspects.forget(["b"]) == []
    after = suspects.on_crash(["a", "b"])
    assert (after.resumed, after.is_search, after.quarantined) == (["a", "b"], False, None)


def test_a_request_with_tokens_since_the_crash_is_not_tested_again() -> None:
    suspects = Suspects()
    suspects.on_crash(["a", "b", "c"])
    suspects.on_tokens("a", NUM_CLEARING_TOKENS)
    suspects.on_tokens("b", NUM_CLEARING_TOKENS - 1)
    after = suspects.on_crash(["a", "b", "c"])
    assert after.resumed == ["b"]
    assert suspects.is_searching
    assert suspects.on_tokens("b", NUM_CLEARING_TOKENS - 1) == []
    assert suspects.on_tokens("b", 1) == ["c"]
    assert suspects.on_tokens("c", NUM_CLEARING_TOKENS + 1) == ["a"]
    assert suspects.forget(["a"]) == []


def test_a_request_that_is_given_up_is_waited_for_no_longer() -> None:
    suspects = Suspects()
    suspects.on_crash(["a", "b", "c", "d"])
    suspects.on_crash(["a", "b", "c", "d"])
    suspects.hold("new")
    assert suspects.forget(["c", "new"]) == []
    assert suspects.forget(["a", "b"]) == ["d"]


def test_each_crash_says_what_goes_on_and_whether_it_is_a_search() -> None:
    suspects = Suspects()
    assert suspects.on_crash(["a", "b"]) == AfterCrash(["a", "b"], None, is_search=False)
    assert suspects.on_crash(["a", "b"]) == AfterCrash(["a"], None, is_search=True)
    assert suspects.on_crash(["a"]) == AfterCrash(["a"], None, is_search=True)
    assert suspects.on_crash(["a"]) == AfterCrash(["b"], "a", is_search=True)


def test_newcomers_go_on_after_the_last_group_without_those_that_left() -> None:
    suspects = Suspects()
    suspects.on_crash(["a", "b"])
    suspects.on_crash(["a", "b"])
    for newcomer in ("x", "y", "z"):
        suspects.hold(newcomer)
    assert suspects.forget(["y"]) == []
    assert suspects.forget(["a"]) == ["b"]
    assert suspects.forget(["b"]) == ["x", "z"]
    assert not suspects.has_any


def test_a_request_that_got_tokens_after_a_lone_crash_has_both_crashes_before_it_again() -> None:
    suspects = Suspects()
    for running in (["a", "b"], ["a", "b"], ["a"]):
        suspects.on_crash(running)
    assert suspects.on_tokens("a", NUM_CLEARING_TOKENS) == ["b"]
    suspects.forget(["b"])
    assert suspects.on_crash(["a"]) == AfterCrash(["a"], None, is_search=False)
    assert suspects.on_crash(["a"]).quarantined is None
    assert suspects.on_crash(["a"]).quarantined == "a"


def test_a_request_of_another_engine_core_that_died_is_a_suspect_here() -> None:
    suspects = Suspects()
    suspects.suspect("moved")
    assert suspects.has_any
    assert suspects.on_tokens("unknown", 1) == []
    assert suspects.on_crash(["a", "moved"]) == AfterCrash(["moved"], None, is_search=True)
