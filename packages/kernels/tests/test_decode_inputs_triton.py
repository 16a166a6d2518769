"""Inputs of decode steps follow from the state of the rows alone, in Triton as in the reference."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest
import torch

from llmstack_kernels import decode_inputs as op
from llmstack_kernels.decode_inputs import FIRST_BLOCK, DecodeInputs, reference

BLOCK_SIZE = 4
MAX_BLOCKS = 300  # more than one program copies at once
NUM_ROWS = 6


@pytest.fixture(params=["reference", "triton"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    return importlib.import_module(f"llmstack_kernels.decode_inputs.{request.param}")


def make_state(seed: int, device: str) -> torch.Tensor:
    """Random rows of random lengths, and a scratch row with one block of its own."""
    generator = np.random.default_rng(seed)
    state = generator.integers(0, 1000, (NUM_ROWS + 1, FIRST_BLOCK + MAX_BLOCKS), dtype=np.int32)
    state[:, 1] = generator.integers(0, BLOCK_SIZE * MAX_BLOCKS, NUM_ROWS + 1)
    state[-1, :] = 0
    state[-1, FIRST_BLOCK] = 1000
    return torch.from_numpy(state).to(device)


def poisoned(num_rows: int, device: str) -> DecodeInputs:
    wide = torch.full((3, num_rows), -77, device=device)
    tables = torch.full((num_rows, MAX_BLOCKS), -77, dtype=torch.int32, device=device)
    return DecodeInputs(wide[0], wide[1], torch.full_like(wide[0], -77).int(), wide[2], tables)


@pytest.mark.parametrize("seed", range(3))
def test_each_row_gets_its_token_place_and_blocks_and_nothing_beyond(
    kernels: ModuleType, seed: int, triton_device: str
) -> None:
    state = make_state(seed, triton_device)
    rows = [4, 0, NUM_ROWS, 2, NUM_ROWS]
    out = poisoned(len(rows), triton_device)
    kernels.decode_inputs(state, torch.tensor(rows, dtype=torch.int32, device=triton_device), BLOCK_SIZE, out)
    for index, row in enumerate(rows):
        token, position, *blocks = state[row].tolist()
        last = position // BLOCK_SIZE
        assert (int(out.token_ids[index]), int(out.positions[index])) == (token, position)
        assert int(out.seq_lens[index]) == position + 1
        assert int(out.slot_mapping[index]) == blocks[last] * BLOCK_SIZE + position % BLOCK_SIZE
        assert out.block_tables[index].tolist() == blocks[: last + 1] + [-77] * (MAX_BLOCKS - last - 1)


def test_rows_advance_with_their_tokens_and_the_scratch_row_stays(kernels: ModuleType, triton_device: str) -> None:
    state = make_state(0, triton_device)
    before = state.clone()
    rows = torch.tensor([3, NUM_ROWS, 1, NUM_ROWS], dtype=torch.int32, device=triton_device)
    tokens = torch.tensor([11, 12, 13, 14], device=triton_device)
    is_good = torch.tensor([True, True, False, False], device=triton_device)
    results = torch.full((5,), -77, dtype=torch.int32, device=triton_device)
    kernels.advance_rows(state, rows, tokens, is_good, results[:4])
    assert results.tolist() == [11, 12, -1, -1, -77]
    assert state[3, :2].tolist() == [11, int(before[3, 1]) + 1]
    assert state[1, :2].tolist() == [0, int(before[1, 1]) + 1]
    before[[1, 3], :2] = state[[1, 3], :2]
    assert torch.equal(state, before)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_stand_behind_the_last_known_token_of_their_row(
    kernels: ModuleType, seed: int, triton_device: str
) -> None:
    state = make_state(seed, triton_device)
    state[:NUM_ROWS, 1] = state[:NUM_ROWS, 1].clamp(max=BLOCK_SIZE * MAX_BLOCKS - 6)
    rows, places = [4, 4, 4, 4, 4, 4, 0, 2, 2, NUM_ROWS], [0, 1, 2, 3, 4, 5, 0, 0, 1, 0]
    drafts = [[place, 2000 + index] for index, place in enumerate(places)]
    out = poisoned(len(rows), triton_device)
    arrays = [torch.tensor(values, dtype=torch.int32, device=triton_device) for values in (rows, drafts)]
    kernels.decode_inputs(state, arrays[0], BLOCK_SIZE, out, arrays[1])
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        token, position, *blocks = state[row].tolist()
        position += place
        last = position // BLOCK_SIZE
        assert int(out.token_ids[index]) == (2000 + index if place else token)
        assert (int(out.positions[index]), int(out.seq_lens[index])) == (position, position + 1)
        assert int(out.slot_mapping[index]) == blocks[last] * BLOCK_SIZE + position % BLOCK_SIZE
        assert out.block_tables[index].tolist() == blocks[: last + 1] + [-77] * (MAX_BLOCKS - last - 1)


@pytest.mark.parametrize("seed", range(8))
def test_rows_keep_their_right_drafts_and_the_token_behind_them(
    kernels: ModuleType, seed: int, triton_device: str
) -> None:
    """Rows of 0 to 60 drafts over several programs, some of whose tokens are not good, beside a loop over each row."""
    generator = np.random.default_rng(seed)
    num_rows = 40
    state = torch.from_numpy(generator.integers(0, 1000, (num_rows + 1, FIRST_BLOCK + 3), dtype=np.int32))
    state, expected = state.to(triton_device), state.clone()
    rows, drafts, tokens, is_good, num_kept = [], [], [], [], []
    for row in generator.permutation(num_rows + 1).tolist():
        num_drafts = 0 if row == num_rows else int(generator.choice([0, 1, 3, 60]))
        chosen = generator.integers(0, 4, num_drafts + 1).tolist()
        good = (generator.random(num_drafts + 1) < 0.95).tolist()
        is_like_chosen = generator.random(num_drafts) < 0.9
        guesses = np.where(is_like_chosen, chosen[:-1], generator.integers(0, 4, num_drafts)).tolist()
        kept = 1
        while kept <= num_drafts and good[kept - 1] and guesses[kept - 1] == chosen[kept - 1]:
            kept += 1
        rows += [row] * (num_drafts + 1)
        drafts += [[place, ([-5, *guesses])[place]] for place in range(num_drafts + 1)]
        tokens, is_good = tokens + chosen, is_good + good
        num_kept += [kept if row < num_rows and place == kept - 1 else 0 for place in range(num_drafts + 1)]
        if row < num_rows:
            expected[row, 0] = chosen[kept - 1] if good[kept - 1] else 0
            expected[row, 1] += kept
    ids, pairs = (torch.tensor(values, dtype=torch.int32, device=triton_device) for values in (rows, drafts))
    found = torch.full((len(rows) + 1,), -77, device=triton_device)
    chosen_ids, flags = torch.tensor(tokens, device=triton_device), torch.tensor(is_good, device=triton_device)
    kernels.keep_drafts(state, ids, pairs, chosen_ids, flags, found[:-1])
    assert found.tolist() == [*num_kept, -77]
    assert torch.equal(state.cpu(), expected)


@pytest.mark.parametrize("num_updates", [0, 1, 700])
def test_updates_reach_their_places_and_no_others(kernels: ModuleType, num_updates: int, triton_device: str) -> None:
    state = make_state(1, triton_device)
    places = np.random.default_rng(2).choice(state.numel(), num_updates, replace=False)
    updates = np.stack([*np.divmod(places, state.shape[1]), 5000 + np.arange(num_updates)], axis=1).astype(np.int32)
    expected = state.clone()
    expected.view(-1)[torch.from_numpy(places).to(triton_device)] = torch.from_numpy(updates[:, 2]).to(triton_device)
    kernels.update_rows(state, torch.from_numpy(updates).to(triton_device))
    assert torch.equal(state, expected)


def test_what_does_not_fit_is_refused_in_words() -> None:
    state = make_state(0, "cpu")
    rows = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="block tables of shape"):
        op.decode_inputs(state, rows, BLOCK_SIZE, poisoned(3, "cpu"))
    with pytest.raises(ValueError, match="int32"):
        op.update_rows(state, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="do not fit 2 rows"):
        op.advance_rows(state, rows, torch.zeros(3).long(), torch.ones(2).bool(), rows)
    with pytest.raises(ValueError, match=r"drafts must be contiguous int32 \[2, 2\]"):
        op.decode_inputs(state, rows, BLOCK_SIZE, poisoned(2, "cpu"), torch.zeros(2, 3, dtype=torch.int32))
    drafts = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 numbers do not fit 2 rows"):
        op.keep_drafts(state, rows, drafts, torch.zeros(3).long(), torch.ones(2).bool(), torch.zeros(2).long())
    with pytest.raises(ValueError, match="the state must be"):
        op.update_rows(state.long(), torch.zeros(2, 3, dtype=torch.int32))


def test_the_reference_is_what_a_processor_runs() -> None:
    state = make_state(0, "cpu")
    expected = state.clone()
    updates = torch.tensor([[0, 1, 7]], dtype=torch.int32)
    op.update_rows(state, updates)
    reference.update_rows(expected, updates)
    assert torch.equal(state, expected)
