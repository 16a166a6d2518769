"""Random steps over groups and states: every row begins with what its own tokens left, and the books agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmstack_kv_cache import (
    EMPTY_STATE_ID,
    NULL_BLOCK_ID,
    AllCleared,
    BlockStored,
    CompanionStored,
    KVCacheGroup,
    KVCacheManager,
)
from llmstack_kv_cache.groups import separate


class StateMachine(RuleBasedStateMachine):
    """Requests and their states; `states` holds after which tokens each state block is the state.

    A step is made of several rows, as a scheduler makes it, and then computed row by row in any order, perhaps twice.
    """

    @initialize(
        windows=st.lists(st.sampled_from([None, None, 1, 5, 16]), min_size=1, max_size=3),
        num_blocks=st.integers(4, 70),
        num_state_blocks=st.integers(3, 14),
        block_size=st.integers(1, 8),
        num_host_blocks=st.integers(0, 40),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, windows, num_blocks, num_state_blocks, block_size, **options):
        self.groups = [KVCacheGroup(str(number), window) for number, window in enumerate(windows)]
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            groups=self.groups,
            num_state_blocks=num_state_blocks,
            num_reserved_blocks=1,
            max_events=100_000,
            **options,
        )
        self.states = {EMPTY_STATE_ID: ()}
        self.tokens, self.num_computed = {}, {}
        self.swapped = []
        self.num_requests = 0
        self.num_without_state = 0
        self.num_hits = 0
        self.slots = {}  # block and offset to the group, and the prefix whose last token they hold
        self.num_held = {}
        self.known_to_router = {}  # by group, the contents

    @property
    def held(self):
        return [request_id for request_id in self.tokens if request_id not in self.swapped]

    def next_id(self):
        self.num_requests += 1
        return str(self.num_requests)

    def free_request(self, request_id):
        self.manager.free(request_id)
        self.manager.free(request_id)
        self.swapped = [other for other in self.swapped if other != request_id]
        del self.tokens[request_id], self.num_computed[request_id], self.num_held[request_id]

    def check_reads(self, tables, tokens, num_computed):
        """All that the next token attends to is there, in every group."""
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            first = 0 if group.sliding_window is None else max(num_computed - group.sliding_window + 1, 0)
            for place in range(first, num_computed):
                block, offset = divmod(place, self.manager.block_size)
                assert table[block] != NULL_BLOCK_ID
                assert self.slots[table[block], offset] == (number, tuple(tokens[: place + 1]))

    def copy(self, source, destination):
        for offset in range(self.manager.block_size):
            self.slots[destination, offset] = self.slots.get((source, offset))

    def begin(self, tokens, chunk, written):
        """A new request in the step that is being made; None without room."""
        request_id, size = self.next_id(), self.manager.block_size
        free = self.manager.num_free_blocks
        found, num_hits = self.manager.get_computed_blocks(request_id, tokens)
        num_known = self.manager.num_known_tokens
        tables = separate(found, len(self.groups))
        num_held = len(tables[0]) * size
        assert num_hits <= num_held <= num_known < max(len(tokens), 1)
        assert num_held == (num_hits if self.manager.has_windows else num_known)
        self.check_reads(tables, tokens, num_hits)
        if self.manager.allocate_slots(request_id, min(num_hits + chunk, len(tokens)), found) is None:
            assert self.manager.num_free_blocks == free
            return None
        self.num_without_state += num_known - num_hits
        self.num_hits += num_hits
        self.tokens[request_id], self.num_computed[request_id] = list(tokens), num_hits
        self.num_held[request_id] = num_held
        return request_id

    def row(self, request_id, chunk, written, is_kept, replaces_last):
        """One row of the step; what it reads and writes, or None without room."""
        tokens, start = self.tokens[request_id], self.num_computed[request_id]
        end = min(start + chunk, len(tokens))
        self.manager.advance(request_id, start)
        if end == start or self.manager.allocate_slots(request_id, end) is None:
            return
        options = {"is_kept": is_kept, "replaces_last": replaces_last}
        source, target = self.manager.advance_state(request_id, end, **options)
        assert target not in (source, EMPTY_STATE_ID)
        # Of this very step nothing is read: the source was written by an earlier one, with the request's own tokens.
        assert source not in {other_target for _, other_target, _ in written}
        assert self.states[source] == tuple(tokens[:start])
        assert target not in {block_id for pair in written for block_id in pair[:2]}
        written.append((source, target, tuple(tokens[:end])))
        for number, table in enumerate(self.manager.block_tables(request_id)):
            for place in range(max(start, self.num_held[request_id]), end):
                block, offset = divmod(place, self.manager.block_size)
                assert table[block] != NULL_BLOCK_ID
                self.slots[table[block], offset] = number, tuple(tokens[: place + 1])
        self.num_computed[request_id] = end
        self.manager.cache_blocks(request_id, tokens, end)

    @rule(
        data=st.data(),
        rows=st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.booleans()), min_size=1, max_size=4),
        arrivals=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 20)), max_size=3),
        times=st.integers(1, 2),
    )
    def step(self, data, rows, arrivals, times):
        written = []
        for (chunk, is_kept, replaces_last), request_id in zip(rows, self.held, strict=False):
            self.row(request_id, chunk, written, is_kept, replaces_last)
        for length, period, chunk in arrivals:
            tokens = [int(position % period == 0) for position in range(length)]
            request_id = self.begin(tokens, chunk, written)
            if request_id is not None:
                self.row(request_id, chunk, written, True, False)
        self.manager.end_step()
        for _ in range(times):  # a step that is computed again finds what it read the first time
            for source, target, prefix in data.draw(st.permutations(written)):
                assert self.states[source] == prefix[: len(self.states[source])]
                self.states[target] = prefix

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=20))
    def extend(self, data, tokens):
        self.tokens[data.draw(st.sampled_from(self.held))] += tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), back=st.integers(0, 10))
    def fork(self, data, back):
        parent_id, child_id = data.draw(st.sampled_from(self.held)), self.next_id()
        num_tokens = self.num_computed[parent_id] - back
        if num_tokens < 1 or not self.manager.keeps_prefix(parent_id, num_tokens):
            return
        copies = self.manager.fork(parent_id, child_id, num_tokens)
        if copies is not None:
            for source, destination in copies:
                self.copy(source, destination)
            self.num_held[child_id] = 0
            self.tokens[child_id] = self.tokens[parent_id][:num_tokens]
            self.num_computed[child_id] = num_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def swap_out(self, data):
        request_id = data.draw(st.sampled_from(self.held))
        before = self.manager.stats()
        copies = self.manager.swap_out(request_id)
        if copies is None:
            assert self.manager.stats() == before
        else:
            for block_id, host_block_id in copies:
                self.copy(block_id, ("host", host_block_id))
            self.swapped.append(request_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        request_id = data.draw(st.sampled_from(self.swapped))
        copies = self.manager.swap_in(request_id)
        if copies is not None:
            for host_block_id, block_id in copies:
                self.copy(("host", host_block_id), block_id)
            self.num_held[request_id] = 0
            self.swapped.remove(request_id)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        self.free_request(data.draw(st.sampled_from(list(self.tokens))))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(0, 40))
    def forget(self, data, num_tokens):
        tokens = self.tokens[data.draw(st.sampled_from(list(self.tokens)))]
        self.manager.forget_prefix(tokens, num_tokens)
        _, num_found = self.manager.get_computed_blocks("somebody", [*tokens, 0])
        assert num_found <= num_tokens

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.held)

    @rule()
    def a_new_request_gets_in_when_nothing_runs(self):
        """Swapped-out requests never hold all state blocks."""
        if not self.held:
            assert self.manager.allocate_slots("probe", 1) is not None
            self.manager.free("probe")

    @invariant()
    def the_books_agree(self):
        self.manager.check_integrity()

    @invariant()
    def every_request_goes_on_from_its_own_state(self):
        """At most two blocks are live, and the next row's source is the state of the tokens that are computed."""
        for request_id in self.tokens:
            states = self.manager._states.tables[request_id].states
            assert len(states) <= 2
            assert states[-1].num_tokens == self.num_computed[request_id]
            assert self.states[states[-1].block_id] == tuple(self.tokens[request_id][: states[-1].num_tokens])

    @invariant()
    def every_request_has_the_keys_and_values_of_its_tokens(self):
        """Also of those that others wrote and that it computes again, for the sake of a state."""
        for request_id in self.held:
            tokens = self.tokens[request_id]
            num_there = max(self.num_computed[request_id], self.num_held[request_id])
            self.check_reads(self.manager.block_tables(request_id), tokens, num_there)

    @invariant()
    def a_findable_state_is_written(self):
        for block_id in self.manager._states.pool._block_to_identity:
            assert len(self.states[block_id]) % self.manager.block_size == 0

    @invariant()
    def a_router_knows_which_contents_each_group_has(self):
        known, names = self.known_to_router, range(len(self.groups) + 1)
        for event in self.manager.fetch_events()[0]:
            if type(event) is AllCleared:
                known.clear()
            elif type(event) in (BlockStored, CompanionStored):
                assert not known.setdefault(event.group, set()) & set(event.identities)
                known[event.group].update(event.identities)
            else:
                assert known[event.group] >= set(event.identities)
                known[event.group].difference_update(event.identities)
        assert {*known} <= {*names}
        num_known = sum(len(known.get(number, ())) for number in names[:-1])
        assert num_known == self.manager.stats().num_cached_blocks
        assert known.get(names[-1], set()) == set(self.manager._states.pool.identities)
        stored = {}
        for event in self.manager.stored():
            stored.setdefault(event.group, set()).update(event.identities)
        leading = stored.get(self.manager._leader, set())
        assert stored == {group: contents & leading for group, contents in known.items() if contents & leading}

    def teardown(self):
        if hasattr(self, "manager"):
            for request_id in self.tokens:
                self.manager.free(request_id)
            assert self.manager.num_free_blocks == self.manager.num_blocks
            assert self.manager.stats().num_free_state_blocks == self.manager.stats().num_state_blocks
            assert self.manager.prefix_tokens_without_state == self.num_without_state
            assert self.manager.prefix_cache_hits == self.num_hits


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
