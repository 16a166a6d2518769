"""Seeded simulations over tiny pools: every answer is what the model says, whatever happened on the way."""

from collections import Counter
from functools import cache

import pytest
from core_scheduler_helpers.fuzz import load_manager, main, run_seed
from core_scheduler_helpers.replays import check_replay
from core_scheduler_helpers.simulation import BrokenInvariantError, Simulation

from llmstack_core_scheduler import Scheduler
from llmstack_core_scheduler.testing import FakeKVCacheManager, WrongKVError
from llmstack_types import FinishReason

PLAIN = load_manager("llmstack_core_scheduler.testing:FakeKVCacheManager")


def real_manager(num_blocks, block_size, num_host_blocks):
    kv_cache = pytest.importorskip("llmstack_kv_cache")
    return kv_cache.KVCacheManager(num_blocks, block_size, num_host_blocks=num_host_blocks)


def run_plain(seed):
    return run_seed(seed, real_manager)


run_once = cache(run_plain)


@pytest.mark.parametrize("seed", range(20))
def test_the_plain_manager_gives_the_same_answers(seed):
    run_seed(seed, PLAIN)


@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_run_replays_to_the_same_decisions_without_a_model(seed):
    check_replay(Simulation(seed, real_manager), Simulation(seed, real_manager))


def test_the_simulations_are_messy_enough_to_mean_something():
    totals = Counter()
    for seed in range(80):
        totals += run_once(seed)
    # Its requests ask for no detection of repetitions, and what is aborted has no output.
    never_drawn = {FinishReason.ABORT, FinishReason.REPETITION}
    assert min(totals[reason] for reason in FinishReason if reason not in never_drawn) > 5
    for name in ("preemptions", "swap_outs", "swap_ins", "shared", "copies", "drafts", "accepted", "aborted"):
        assert totals[name] > 50, name
    assert totals["hits"] > 500
    assert min(totals["crashes"], totals["protected"], totals["refused"], totals["yields"]) > 5


WINDOWS = ((8,), (None, 5), (1, None), (3, 20, None), (None, None, 12), (2,), (40, 7))


@cache
def run_windows(seed, num_stages=1):
    """A run whose layers have sliding windows; the first is a group without one in half of the runs."""
    kv_cache = pytest.importorskip("llmstack_kv_cache")
    windows = WINDOWS[seed % len(WINDOWS)]
    groups = [kv_cache.KVCacheGroup(str(number), window) for number, window in enumerate(windows)]

    def make_manager(num_blocks, block_size, num_host_blocks):
        return kv_cache.KVCacheManager(num_blocks, block_size, groups=groups, num_host_blocks=num_host_blocks)

    return run_seed(seed, make_manager, windows, num_stages)


def run_stages(seed):
    """A run of a model of two to four stages, which compute different steps; half of the models have windows."""
    num_stages = 2 + seed % 3
    return run_seed(seed, real_manager, num_stages=num_stages) if seed % 2 else run_windows(seed, num_stages)


def test_the_simulations_with_windows_are_messy_enough_to_mean_something():
    totals = Counter()
    for seed in range(100):
        totals += run_windows(seed)
    for name in ("preemptions", "swap_outs", "swap_ins", "shared", "copies", "drafts", "accepted", "aborted", "passed"):
        assert totals[name] > 50, name
    assert totals["hits"] > 500
    assert min(totals["crashes"], totals["protected"], totals["refused"], totals["yields"]) > 5


@cache
def run_states(seed, num_stages=1, windows=(None,)):
    """A run of a model with states; the pools of half of the seeds have hardly room for the rows."""
    kv_cache = pytest.importorskip("llmstack_kv_cache")
    num_state_blocks = 3 + seed % 7 if seed % 2 else 200
    groups = [kv_cache.KVCacheGroup(str(number), window) for number, window in enumerate(windows)]

    def make_manager(num_blocks, block_size, num_host_blocks):
        options = {"groups": groups, "num_state_blocks": num_state_blocks, "num_host_blocks": num_host_blocks}
        return kv_cache.KVCacheManager(num_blocks, block_size, **options)

    return run_seed(seed, make_manager, windows, num_stages, num_state_blocks)


def run_states_beside_windows(seed):
    return run_states(seed, 1 + seed % 3 // 2, WINDOWS[seed % len(WINDOWS)])


def run_states_in_stages(seed):
    return run_states(seed, 2 + seed % 3)


def ranges(run, first, last, size):
    """The seeds of a run, so many in a test."""
    return [
        pytest.param(run, range(start, start + size), id=f"{run.__name__}-{start}")
        for start in range(first, last, size)
    ]


@pytest.mark.parametrize(
    ("run", "seeds"),
    [
        *ranges(run_once, 0, 300, 50),
        *ranges(run_stages, 0, 100, 50),
        *ranges(run_windows, 0, 100, 50),
        *ranges(run_states, 0, 150, 50),
        *ranges(run_states_in_stages, 1000, 1050, 50),
        *ranges(run_states_beside_windows, 0, 60, 60),
    ],
)
def test_every_answer_is_what_the_model_says(run, seeds):
    for seed in seeds:
        run(seed)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("run", "seeds"),
    [
        *ranges(run_plain, 300, 10_300, 500),
        *ranges(run_stages, 100, 5_100, 500),
        *ranges(run_windows, 100, 5_100, 500),
        *ranges(run_states, 150, 5_150, 500),
        *ranges(run_states_beside_windows, 100, 5_100, 500),
    ],
)
def test_every_answer_of_many_runs_is_what_the_model_says(run, seeds):
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize("run", [run_states, run_states_beside_windows])
def test_the_simulations_with_states_are_messy_enough_to_mean_something(run):
    totals = Counter()
    for seed in range(110 if run is run_states else 60):
        totals += run(seed)
    if run is not run_states:
        assert totals["passed"] > 50
        assert min(totals["hits"], totals["without_state"]) > 50
        return
    for name in ("preemptions", "swap_outs", "swap_ins", "shared", "drafts", "accepted", "aborted", "without_state"):
        assert totals[name] > 50, name
    assert totals["hits"] > 500
    assert min(totals["crashes"], totals["protected"], totals["refused"], totals["yields"]) > 5


class ForgetsToCopy(FakeKVCacheManager):
    def fork(self, parent_id, child_id, num_tokens):
        return super().fork(parent_id, child_id, num_tokens) and []


class SwapsInAnyOrder(FakeKVCacheManager):
    def swap_in(self, request_id):
        copies = super().swap_in(request_id)
        return copies and list(zip([host for host, _ in copies], [block for _, block in reversed(copies)], strict=True))


class FindsWhatIsGone(FakeKVCacheManager):
    def _forget(self, block_ids):
        pass


def run_seeds(num_seeds, make_manager):
    for seed in range(num_seeds):
        run_seed(seed, make_manager)


@pytest.mark.parametrize("manager", [ForgetsToCopy, SwapsInAnyOrder, FindsWhatIsGone])
def test_a_manager_that_is_wrong_is_found(manager):
    with pytest.raises((WrongKVError, BrokenInvariantError)):
        run_seeds(200, lambda blocks, size, host: manager(blocks, size, num_host_blocks=host))


def test_a_scheduler_that_preempts_the_oldest_is_found(monkeypatch):
    make_room = Scheduler._make_room

    def preempt_the_first(self, request, num_tokens, plan):
        if len(self.running) > 2 and self._kv_cache_manager.num_free_blocks < 1:
            self._preempt(self.running.first(), plan)
        return make_room(self, request, num_tokens, plan)

    monkeypatch.setattr(Scheduler, "_make_room", preempt_the_first)
    with pytest.raises(Exception) as caught:  # any kind: what matters is that its seed comes with it
        run_seeds(100, PLAIN)
    assert any("--start" in note for note in caught.value.__notes__)


def test_the_command_says_what_it_ran(capsys):
    assert main(["--seeds", "2", "--start", "7"]) == 0
    printed = capsys.readouterr().out
    assert "2 seeds held" in printed
    assert "steps" in printed


@pytest.mark.parametrize(
    ("arguments", "name"), [(["--seeds", "0"], "--seeds"), (["--manager", "nowhere:Nobody"], "nowhere:Nobody")]
)
def test_the_command_names_what_it_cannot_use(arguments, name, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert name in capsys.readouterr().err
