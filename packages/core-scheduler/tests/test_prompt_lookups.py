"""Long prompts are looked up in pieces: bounded work in each step, and nothing of what is cached is lost."""

from collections import Counter

import pytest
from core_scheduler_helpers.fuzz import run_seed
from core_scheduler_helpers.steps import answer, make_request, rows_of

from llmstack_core_scheduler import Scheduler, SchedulerConfig, prompt_lookups
from llmstack_core_scheduler import scheduler as scheduler_module
from llmstack_core_scheduler.snapshot import restore_snapshot, take_snapshot
from llmstack_core_scheduler.testing import FakeKVCacheManager

PROMPT = list(range(400))


class CountingManager(FakeKVCacheManager):
    """Counts the blocks that are found in each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_looked_up = []

    def look_ahead(self, *args):
        found = super().look_ahead(*args)
        self.num_looked_up[-1] += found
        return found


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Prompts of 8 tokens are long, and a step looks up 16 blocks."""
    monkeypatch.setattr(scheduler_module, "LONG_PROMPT_TOKENS", 8)
    for name, number in {
        "_MAX_STEP_BLOCKS": 16, "_MIN_PIECE_BLOCKS": 2, "_TURN_BLOCKS": 1, "_USUAL_STEP_TOKENS": 10_000
    }.items():  # fmt: skip
        monkeypatch.setattr(prompt_lookups, name, number)


def make(num_blocks=400, **changes):
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "max_model_len": 512} | changes
    return Scheduler(SchedulerConfig(**config), CountingManager(num_blocks, 4))


def step(scheduler):
    scheduler.kv_cache_manager.num_looked_up.append(0)
    scheduled = scheduler.schedule(0.0)
    scheduler.update_from_output(scheduled, answer(scheduled), 0.0)
    return rows_of(scheduled)


def warm(scheduler, prompt=PROMPT, **kwargs):
    """Computes a prompt, which is cached from then on."""
    scheduler.add_request(make_request("warm", 0, prompt=prompt, max_tokens=1, **kwargs))
    while scheduler.has_unfinished_requests():
        step(scheduler)
    scheduler.kv_cache_manager.num_looked_up.clear()
    return scheduler


def test_a_step_looks_up_a_bounded_number_of_blocks_and_finds_all_in_the_end():
    scheduler = warm(make())
    scheduler.add_request(make_request("long", 0, prompt=[*PROMPT, 1], max_tokens=1))
    rows = []
    while not rows or not rows[-1]:
        rows.append(step(scheduler))
    numbers = scheduler.kv_cache_manager.num_looked_up
    assert sum(numbers) == len(PROMPT) // 4
    assert max(numbers) <= 16
    assert len(rows) == 1 + -(-(len(PROMPT) // 4 - 8) // 16)  # half a step's share when it comes
    assert rows[-1] == {"long": 1}


def test_many_long_prompts_do_not_make_a_step_longer():
    scheduler = warm(make(max_num_seqs=4))
    for number in range(40):
        request = make_request(f"r{number}", 0, prompt=[*PROMPT, number], max_tokens=1, tenant=f"t{number % 5}")
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        step(scheduler)
    numbers = scheduler.kv_cache_manager.num_looked_up
    assert sum(numbers) == 40 * len(PROMPT) // 4
    assert max(numbers) <= 16 + 16 + 2 * 40  # what waits, what comes, and the least piece of each that comes


def test_more_is_looked_up_behind_a_step_that_computes_prompts(monkeypatch):
    monkeypatch.setattr(prompt_lookups, "_USUAL_STEP_TOKENS", 16)
    scheduler = warm(make(max_num_batched_tokens=100))
    scheduler.add_request(make_request("short", 5, max_tokens=1))
    step(scheduler)
    for name, prompt in (("long", [*PROMPT, 1]), ("cold", [9] * 300)):
        scheduler.add_request(make_request(name, 0, prompt=prompt, max_tokens=1))
    scheduler.kv_cache_manager.num_looked_up.clear()
    while "long" not in step(scheduler):
        pass
    assert scheduler.kv_cache_manager.num_looked_up[:2] == [8, len(PROMPT) // 4 - 8]


def test_a_short_prompt_and_a_cold_one_overtake_a_lookup():
    scheduler = warm(make())
    for name, prompt in (("long", [*PROMPT, 1]), ("short", [7] * 5), ("cold", [9] * 300)):
        scheduler.add_request(make_request(name, 0, prompt=prompt, max_tokens=2))
    assert step(scheduler) == {"short": 5, "cold": 300}


def test_tenants_take_turns_with_their_lookups():
    scheduler = warm(make(policy="fair"), tenant="few")
    for number in range(6):
        scheduler.add_request(make_request(f"many{number}", 0, prompt=[*PROMPT, number], tenant="many"))
    scheduler.add_request(make_request("few", 0, prompt=[*PROMPT, 99], tenant="few"))
    first = set()
    while "few" not in first:
        first |= set(step(scheduler))
    assert first == {"many0", "few"}


@pytest.mark.parametrize("policy", ["fair", "deadline"])
def test_lookups_of_a_tenant_hold_up_no_other_one(policy):
    scheduler = warm(make(policy=policy), tenant="many")
    for number in range(100):  # more than may be overtaken in a step
        scheduler.add_request(make_request(f"many{number}", 0, prompt=[*PROMPT, number], tenant="many"))
    scheduler.add_request(make_request("few", 0, prompt=[7] * 5, tenant="few"))
    assert "few" in step(scheduler)


@pytest.mark.parametrize("num_each", [1, 2])
def test_lookups_of_many_tenants_hold_up_no_further_one(num_each):
    scheduler = warm(make(policy="fair", max_num_seqs=200), PROMPT[:160], tenant="many0")
    for number in range(80 * num_each):  # more than requests that may be overtaken in a step
        prompt = [*PROMPT[:160], number]
        scheduler.add_request(make_request(f"r{number}", 0, prompt=prompt, tenant=f"many{number % 80}"))
    scheduler.add_request(make_request("few", 0, prompt=[7] * 5, tenant="few"))
    assert "few" in step(scheduler)
    for _ in range(5):
        step(scheduler)
    assert max(scheduler.kv_cache_manager.num_looked_up) <= 16 + 2 * 16 + 2


def test_an_urgent_prompt_is_looked_up_before_others_of_its_tenant():
    scheduler = warm(make(policy="priority"))
    for number in range(6):
        scheduler.add_request(make_request(f"later{number}", 0, prompt=[*PROMPT, number], priority=5))
    step(scheduler)
    scheduler.add_request(make_request("urgent", 0, prompt=[*PROMPT, 99]))
    first = set()
    while not first:
        first |= set(step(scheduler))
    assert first == {"urgent"}


def test_lookups_of_many_tenants_end_one_after_the_other():
    """Nothing else would run meanwhile: a simulation would find no progress."""
    scheduler = warm(make())
    for number in range(40):
        scheduler.add_request(
            make_request(f"r{number}", 0, prompt=[*PROMPT, number], max_tokens=1, tenant=f"t{number}")
        )
    num_steps = 1
    while not step(scheduler):
        num_steps += 1
    assert num_steps <= len(PROMPT) // 4 // 8 + 2


def test_what_is_evicted_in_the_meantime_is_computed():
    scheduler = warm(make(num_blocks=104))
    scheduler.add_request(make_request("long", 0, prompt=[*PROMPT, 1], max_tokens=1))
    step(scheduler)
    scheduler.kv_cache_manager.forget_prefix(PROMPT, 20)
    rows = {}
    while "long" not in rows:
        rows = step(scheduler)
    assert rows == {"long": len(PROMPT) + 1 - 20}


def test_what_becomes_known_in_the_meantime_is_found():
    scheduler = warm(make(), PROMPT[:200])
    scheduler.add_request(make_request("other", 0, prompt=[*PROMPT, 1], max_tokens=1))
    scheduler.add_request(make_request("long", 0, prompt=[*PROMPT, 2], max_tokens=1))
    rows = {}
    while scheduler.has_unfinished_requests():
        rows |= step(scheduler)
    assert rows == {"other": 201, "long": 1}


def test_an_aborted_request_leaves_no_lookup():
    scheduler = warm(make())
    scheduler.add_request(make_request("long", 0, prompt=[*PROMPT, 1]))
    step(scheduler)
    assert scheduler._lookups.pending
    scheduler.abort_requests(["long"])
    assert not scheduler._lookups.pending
    assert not scheduler.kv_cache_manager._num_looked_up
    assert not scheduler.has_unfinished_requests()


def test_a_snapshot_amid_lookups_goes_on_with_them():
    scheduler = warm(make())
    for number in range(3):
        scheduler.add_request(
            make_request(f"r{number}", 0, prompt=[*PROMPT, number], max_tokens=3, tenant=f"t{number}")
        )
    step(scheduler)
    state, arrivals = take_snapshot(scheduler)
    restored = make()
    vars(restored.kv_cache_manager).update(
        {
            name: value.copy() if hasattr(value, "copy") else value
            for name, value in vars(scheduler.kv_cache_manager).items()
        }
    )
    restore_snapshot(restored, state, arrivals)
    assert take_snapshot(restored)[0] == state
    while scheduler.has_unfinished_requests():
        assert step(scheduler) == step(restored)
    assert not restored.has_unfinished_requests()


@pytest.mark.parametrize("windows", [(None,), (5, None)])
@pytest.mark.parametrize("num_state_blocks", [0, 40])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_answer_is_what_the_model_says_with_pieces_of_a_block(monkeypatch, windows, num_state_blocks, num_stages):
    kv_cache = pytest.importorskip("llmstack_kv_cache")
    groups = [kv_cache.KVCacheGroup(str(number), window) for number, window in enumerate(windows)]
    monkeypatch.setattr(scheduler_module, "LONG_PROMPT_TOKENS", 1)
    for name, number in {"_MAX_STEP_BLOCKS": 2, "_MIN_PIECE_BLOCKS": 1}.items():
        monkeypatch.setattr(prompt_lookups, name, number)

    def make_manager(num_blocks, block_size, num_host_blocks):
        options = {"groups": groups, "num_state_blocks": num_state_blocks, "num_host_blocks": num_host_blocks}
        return kv_cache.KVCacheManager(num_blocks, block_size, **options)

    runs = (run_seed(seed, make_manager, windows, num_stages, num_state_blocks) for seed in range(10))
    totals = sum(runs, Counter())
    assert totals["lookups"] > 20
    assert totals["hits"] > 50
