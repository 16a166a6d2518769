"""Random calls of a hybrid cache: every request reads its own tokens, and the books agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmstack_kv_cache import NULL_BLOCK_ID, KVCacheGroup, KVCacheManager
from llmstack_kv_cache.groups import separate


class HybridMachine(RuleBasedStateMachine):
    """Requests over groups; `slots` holds what was last written where, and by which group.

    `passed` holds the blocks that a window has passed, and that no lookup had found: the first to be evicted.
    """

    @initialize(
        windows=st.lists(st.sampled_from([None, None, 1, 5, 16, 40]), min_size=1, max_size=3),
        num_blocks=st.integers(2, 50),
        block_size=st.integers(1, 16),
        num_host_blocks=st.integers(0, 40),
        watermark=st.sampled_from([0.0, 0.1]),
    )
    def start(self, windows, num_blocks, block_size, **options):
        self.groups = [KVCacheGroup(str(number), window) for number, window in enumerate(windows)]
        self.manager = KVCacheManager(num_blocks, block_size, groups=self.groups, num_reserved_blocks=1, **options)
        self.slots, self.host_slots = {}, {}
        self.tokens, self.num_computed = {}, {}
        self.swapped = []
        self.useful = {}  # by request: indices of blocks that are not the first to be evicted, in each group
        self.num_requests = 0
        self.leader = next((i for i, group in enumerate(self.groups) if group.sliding_window is None), 0)
        self.num_found = {}
        self.passed = set()

    @property
    def held(self):
        return [request_id for request_id in self.tokens if request_id not in self.swapped]

    def next_id(self):
        self.num_requests += 1
        return str(self.num_requests)

    def choose(self, data):
        return data.draw(st.sampled_from(self.held))

    def unchanged(self, function, *arguments):
        before = self.manager.stats()
        answer = function(*arguments)
        assert answer is not None or self.manager.stats() == before
        return answer

    def copy(self, copies, source, destination):
        for source_id, destination_id in copies:
            for offset in range(self.manager.block_size):
                destination[destination_id, offset] = source.get((source_id, offset))

    def check_reads(self, tables, tokens, num_computed):
        """All that the next token attends to is there, in every group."""
        size = self.manager.block_size
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            first = 0 if group.sliding_window is None else max(num_computed - group.sliding_window + 1, 0)
            for position in range(first, num_computed):
                block_id = table[position // size]
                assert block_id != NULL_BLOCK_ID
                assert self.slots[block_id, position % size] == (number, tuple(tokens[: position + 1]))

    def advance(self, request_id, num_tokens):
        """The blocks that the windows have passed now, and that can be found, but hardly ever will be."""
        before = self.manager.block_tables(request_id)
        self.manager.advance(request_id, num_tokens)
        self.findable = {block_id for block_id, run in enumerate(self.manager._prefix_index.runs) if run}
        passed = {
            block_id
            for ids, left, useful in zip(
                before, self.manager.block_tables(request_id), self.useful[request_id], strict=True
            )
            for i, (block_id, now) in enumerate(zip(ids, left, strict=True))
            if block_id != now and i not in useful
        }
        return {block_id for block_id in passed & self.findable if self.manager._pool.is_free(block_id)}

    def note_useful(self, request_id, tokens, num_found, num_known):
        """Useful is what a lookup has found, where the prompt ends, and where known prefixes end without a window."""
        size, self.useful[request_id] = self.manager.block_size, []
        leader = next((i for i, group in enumerate(self.groups) if group.sliding_window is None), 0)
        for number, group in enumerate(self.groups):
            useful = set(range(num_found))
            for end in ((len(tokens) - 1) // size, num_known):
                useful.update(range(min(group.first_needed_block(end * size, size), end - 1), end))
            self.useful[request_id].append(range(len(tokens) + 10**6) if number == leader else useful)

    def compute(self, request_id, num_tokens):
        manager, size, tokens = self.manager, self.manager.block_size, self.tokens[request_id]
        start = self.num_computed[request_id]
        useless = self.advance(request_id, start)
        end = min(start + num_tokens, len(tokens))
        if end == start or (new := self.unchanged(manager.allocate_slots, request_id, end)) is None:
            return
        if len(new) <= len(useless):
            assert not self.findable & set(new) - useless
        manager.cache_blocks(request_id, tokens, end)
        tables = manager.block_tables(request_id)
        others = {b for r in self.held if r != request_id for table in manager.block_tables(r) for b in table}
        for number, table in enumerate(tables):
            for position in range(start, end):
                block_id = table[position // size]
                assert block_id != NULL_BLOCK_ID
                assert block_id not in others
                self.slots[block_id, position % size] = (number, tuple(tokens[: position + 1]))
        self.num_computed[request_id] = end

    def begin(self, tokens, chunk):
        """The id of a new request, if there was room for its first tokens."""
        request_id, size = self.next_id(), self.manager.block_size
        num_known = len(self.manager._prefix_index.find(tokens, (len(tokens) - 1) // size, "")[0])
        found, num_hits = self.manager.get_computed_blocks(request_id, tokens)
        assert num_hits < len(tokens)
        by_group = separate(found, len(self.groups))
        assert {len(block_ids) * size for block_ids in by_group} == {num_hits}
        self.check_reads(by_group, tokens, num_hits)
        if self.unchanged(self.manager.allocate_slots, request_id, min(num_hits + chunk, len(tokens)), found) is None:
            return None
        self.tokens[request_id], self.num_computed[request_id] = tokens, num_hits
        self.note_useful(request_id, tokens, num_hits // size, num_known)
        self.compute(request_id, chunk)
        return request_id

    @rule(length=st.integers(1, 120), period=st.integers(1, 3), chunk=st.integers(1, 120))
    def add(self, length, period, chunk):
        self.begin([int(position % period == 0) for position in range(length)], chunk)

    @rule(length=st.integers(20, 120), chunk=st.integers(1, 20))
    def run_whole(self, length, chunk):
        """A prompt that no other request has, in chunks as far as there is room."""
        request_id = self.begin([2 + self.num_requests] * length, chunk)
        if request_id is not None:
            for _ in range(length // chunk):
                self.compute(request_id, chunk)
            self.free_request(request_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=20))
    def go_on(self, data, tokens):
        request_id = self.choose(data)
        self.compute(request_id, len(self.tokens[request_id]))
        self.tokens[request_id] += tokens
        self.compute(request_id, len(tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), back=st.integers(0, 30))
    def fork(self, data, back):
        parent_id, child_id = self.choose(data), self.next_id()
        num_tokens = self.num_computed[parent_id] - back
        try:
            copies = self.unchanged(self.manager.fork, parent_id, child_id, num_tokens)
        except ValueError:
            return
        if copies is not None:
            self.copy(copies, self.slots, self.slots)
            self.tokens[child_id] = self.tokens[parent_id][:num_tokens]
            self.useful[child_id] = self.useful[parent_id]
            self.num_computed[child_id] = num_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def swap_out(self, data):
        request_id = self.choose(data)
        copies = self.unchanged(self.manager.swap_out, request_id)
        if copies is not None:
            self.copy(copies, self.slots, self.host_slots)
            self.swapped.append(request_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        request_id = data.draw(st.sampled_from(self.swapped))
        copies = self.unchanged(self.manager.swap_in, request_id)
        if copies is not None:
            self.copy(copies, self.host_slots, self.slots)
            self.swapped.remove(request_id)
            self.note_useful(request_id, [0], 0, 0)

    def free_request(self, request_id):
        self.manager.free(request_id)
        self.manager.free(request_id)
        self.swapped = [other for other in self.swapped if other != request_id]
        del self.tokens[request_id], self.num_computed[request_id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        self.free_request(data.draw(st.sampled_from(list(self.tokens))))

    @rule(num_blocks=st.integers(2, 50))
    def resize(self, num_blocks):
        self.manager.resize(num_blocks)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(0, 100))
    def forget(self, data, num_tokens):
        tokens = self.tokens[data.draw(st.sampled_from(list(self.tokens)))]
        self.manager.forget_prefix(tokens, num_tokens)
        _, num_found = self.manager.get_computed_blocks("somebody", [*tokens, 0])
        assert num_found <= num_tokens

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.held)

    @invariant()
    def the_books_agree(self):
        self.manager.check_integrity()
        used = {b for r in self.held for table in self.manager.block_tables(r) for b in table} - {NULL_BLOCK_ID}
        assert self.manager.num_free_blocks + len(used) == self.manager.num_blocks

    @invariant()
    def every_request_reads_its_own_tokens(self):
        for request_id in self.held:
            tables = self.manager.block_tables(request_id)
            self.check_reads(tables, self.tokens[request_id], self.num_computed[request_id])

    def teardown(self):
        if hasattr(self, "manager"):
            for request_id in self.tokens:
                self.manager.free(request_id)
            assert self.manager.num_free_blocks == self.manager.num_blocks
            assert self.manager.num_free_host_blocks == self.manager.num_host_blocks


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
