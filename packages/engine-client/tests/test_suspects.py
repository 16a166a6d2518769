"""The request that crashes an engine core is found, and no other request is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_client.recovery.recovering import TURN_S
from llmstack_engine_client.recovery.suspects import NUM_CLEARING_TOKENS, AfterCrash, Suspects

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
    assert suspects.on_crash(["a"]) == AfterCrash(["a"], None, is_search=True, num_lone_crashes=1)
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


def test_a_crash_says_nothing_of_requests_that_the_engine_core_had_not_received() -> None:
    suspects = Suspects()
    assert suspects.on_crash([], ["late"]) == AfterCrash(["late"])
    assert suspects.on_crash(["a"], ["late"]) == AfterCrash(["a", "late"])
    assert suspects.on_crash(["a"], ["late"]) == AfterCrash(["a"], is_search=True, num_lone_crashes=1)
    assert suspects.on_crash([], ["late"]) == AfterCrash(["late"], is_search=True)  # neither of them was in it
    assert suspects.on_crash(["a"]) == AfterCrash(["late"], "a", is_search=True)
    assert suspects.forget(["late"]) == []
    assert not suspects.has_any


def test_a_group_in_test_that_was_not_received_is_tested_next() -> None:
    suspects = Suspects()
    suspects.on_crash(["a", "b", "c", "d"])
    assert suspects.on_crash(["a", "b", "c", "d"]).resumed == ["a", "b"]
    assert suspects.on_crash(["a"], ["b"]) == AfterCrash(["a"], is_search=True, num_lone_crashes=1)
    assert suspects.forget(["a"]) == ["b"]
    assert suspects.forget(["b"]) == ["c", "d"]


def test_ends_from_outside_count_only_where_nothing_made_progress_between_several() -> None:
    suspects = Suspects()
    for _ in range(2):
        assert suspects.on_crash(["a", "b"], is_outside=True) == AfterCrash(["a", "b"])
    assert suspects.on_tokens("a", NUM_CLEARING_TOKENS) == []
    for _ in range(2):
        assert suspects.on_crash(["a", "b"], is_outside=True) == AfterCrash(["a", "b"])
    assert suspects.on_crash(["a", "b"], is_outside=True) == AfterCrash(["a"], is_search=True)
    assert suspects.on_crash(["a"], is_outside=True) == AfterCrash(["a"], is_search=True, num_lone_crashes=1)
    assert suspects.on_crash(["a"], is_outside=True) == AfterCrash(["b"], "a", is_search=True)


def test_a_crash_after_an_end_from_outside_is_the_first_one() -> None:
    suspects = Suspects()
    suspects.on_crash(["a", "b"], is_outside=True)
    assert suspects.on_crash(["a", "b"]) == AfterCrash(["a", "b"])
    assert suspects.on_crash(["a", "b"], is_outside=True) == AfterCrash(["a", "b"])
    assert suspects.on_crash(["a", "b"]) == AfterCrash(["a"], is_search=True)
    assert suspects.on_crash(["a"], is_outside=True) == AfterCrash(["a"], is_search=True)


@given(st.data())
def test_ends_from_outside_between_some_progress_end_no_request(data: st.DataObject) -> None:
    suspects, names = Suspects(), ["a", "b", "c"]
    for _ in range(data.draw(st.integers(1, 30))):
        for _ in range(data.draw(st.integers(1, 2))):
            assert suspects.on_crash(names, is_outside=True) == AfterCrash(names)
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1)):
            assert suspects.on_tokens(name, NUM_CLEARING_TOKENS) == []


class Shared:
    """One engine core of several clients, in simulated time: a killer ends it as soon as it is received."""

    def __init__(self, names: list[list[str]], killer: str, clearing_s: float) -> None:
        self.clients = [Suspects(is_shared=True) for _ in names]
        self.killer, self.clearing_s = killer, clearing_s
        self.afters = [AfterCrash(one) for one in names]
        self.quarantined: list[str] = []
        self.num_deaths = 0

    def run(self) -> None:
        while self._live():
            self.num_deaths += 1
            assert self.num_deaths < MAX_NUM_DEATHS

    def _live(self) -> bool:
        """The life of one engine core; whether it crashed."""
        running: list[list[str]] = [[] for _ in self.clients]
        waiting = [list(after.resumed) for after in self.afters]
        times_s = [
            TURN_S * index * 2**after.num_lone_crashes if after.is_search else 0.0
            for index, after in enumerate(self.afters)
        ]
        events = [(time_s, index, "") for index, time_s in enumerate(times_s)]
        while events:
            events.sort()
            now_s, index, cleared = events.pop(0)
            waiting[index] += self.clients[index].on_tokens(cleared, NUM_CLEARING_TOKENS) if cleared else []
            while now_s >= times_s[index] and waiting[index]:
                running[index].append(waiting[index].pop(0))
                events.append((now_s + self.clearing_s, index, running[index][-1]))
                if running[index][-1] == self.killer:
                    self._crash(running, waiting)
                    return True
        return False

    def _crash(self, running: list[list[str]], waiting: list[list[str]]) -> None:
        for index, client in enumerate(self.clients):
            if not running[index]:  # it waits for its turn still
                continue
            after = self.afters[index] = client.on_crash(running[index], waiting[index])
            self.quarantined += [] if after.quarantined is None else [after.quarantined]


@given(st.lists(st.integers(1, 6), min_size=2, max_size=3), st.floats(0.05, 1.9), st.data())
def test_beside_a_killer_no_request_of_another_client_is_quarantined(
    sizes: list[int], clearing_s: float, data: st.DataObject
) -> None:
    names = [[f"{index}.{number}" for number in range(size)] for index, size in enumerate(sizes)]
    killer = data.draw(st.sampled_from([name for client in names for name in client]))
    shared = Shared(names, killer, clearing_s)
    shared.run()
    assert shared.quarantined == [killer]
    assert shared.num_deaths <= sum(sizes).bit_length() + 5
