"""Whatever is done in whatever order, no table ever leads to anything but its request's own tokens."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmstack_kv_cache import DuplicateRequestError, KVCacheManager, UnknownRequestError, num_blocks_for

PATTERNS = [[0], [1], [0, 1], [1, 0, 0], [0, 0, 0, 1]]


class CacheMachine(RuleBasedStateMachine):
    """Requests over a small pool; `slots` and `host_slots` play the tensors and hold what was last written where."""

    @initialize(
        num_blocks=st.integers(2, 50),
        block_size=st.integers(1, 64),
        enabled=st.sampled_from([True] * 4 + [False]),
        num_host_blocks=st.integers(0, 30),
        num_reserved_blocks=st.integers(0, 1),
        watermark=st.sampled_from([0.0, 0.0, 0.1]),
        max_events=st.sampled_from([0, 3, 10_000]),
    )
    def start(self, num_blocks, block_size, enabled, **options):
        self.manager = KVCacheManager(num_blocks, block_size, enabled, **options)
        self.enabled = enabled
        self.max_events = options["max_events"]
        self.slots, self.host_slots = {}, {}
        self.tokens, self.salts, self.num_computed = {}, {}, {}  # by request
        self.swapped = []
        self.num_requests = 0
        self.known_to_router = {}

    def next_id(self):
        self.num_requests += 1
        return str(self.num_requests)

    def choose(self, data, swapped=False):
        return data.draw(st.sampled_from(self.swapped if swapped else self.held))

    @property
    def held(self):
        return [request_id for request_id in self.tokens if request_id not in self.swapped]

    def unchanged(self, function, *arguments):
        """Whether the call changed something that can be seen, or answered None and did not."""
        before = self.manager.stats()
        answer = function(*arguments)
        assert answer is not None or self.manager.stats() == before
        return answer

    def copy(self, copies, source, destination):
        for source_id, destination_id in copies:
            for offset in range(self.manager.block_size):
                destination[destination_id, offset] = source.get((source_id, offset))

    def write(self, request_id, end):
        table, size = self.manager.block_table(request_id), self.manager.block_size
        tokens, salt = self.tokens[request_id], self.salts[request_id]
        for position in range(self.num_computed[request_id], end):
            block_id = table[position // size]
            owners = [r for r in self.held if block_id in self.manager.block_table(r)]
            assert owners == [request_id], "a block that is written has one owner"
            self.slots[block_id, position % size] = (salt, tuple(tokens[: position + 1]))
        self.num_computed[request_id] = end

    def compute(self, request_id, num_tokens):
        """Gives up to `num_tokens` more tokens room, makes them findable and writes them, as one step does."""
        end = min(self.num_computed[request_id] + num_tokens, len(self.tokens[request_id]))
        if self.unchanged(self.manager.allocate_slots, request_id, max(end, 1)) is not None:
            self.manager.cache_blocks(request_id, self.tokens[request_id], end)
            self.write(request_id, end)

    @rule(
        length=st.integers(1, 150),
        pattern=st.sampled_from(PATTERNS),
        salt=st.sampled_from(["", "", "tenant", "\ud800"]),
        chunk=st.integers(1, 150),
    )
    def add(self, length, pattern, salt, chunk):
        request_id, size = self.next_id(), self.manager.block_size
        tokens = [pattern[position % len(pattern)] for position in range(length)]
        block_ids, num_hits = self.manager.get_computed_blocks(request_id, tokens, salt)
        assert num_hits == len(block_ids) * size <= length - 1
        assert self.enabled or not block_ids
        for position in range(num_hits):
            assert self.slots[block_ids[position // size], position % size] == (salt, tuple(tokens[: position + 1]))
        end = min(num_hits + chunk, length)
        table = self.unchanged(self.manager.allocate_slots, request_id, end, block_ids, salt)
        if table is not None:
            assert table[: len(block_ids)] == block_ids
            assert len(set(table)) == len(table) == num_blocks_for(end, size)
            self.tokens[request_id], self.salts[request_id], self.num_computed[request_id] = tokens, salt, num_hits
            self.compute(request_id, end - num_hits)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(1, 100))
    def go_on(self, data, num_tokens):
        self.compute(self.choose(data), num_tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def decode(self, data, tokens):
        request_id = self.choose(data)
        self.compute(request_id, len(self.tokens[request_id]))
        self.tokens[request_id] += tokens
        self.compute(request_id, len(tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(1, 150))
    def fork(self, data, num_tokens):
        parent_id, child_id = self.choose(data), self.next_id()
        num_tokens = min(num_tokens, self.num_computed[parent_id])
        if not num_tokens:
            return
        table, size = self.manager.block_table(parent_id), self.manager.block_size
        copies = self.unchanged(self.manager.fork, parent_id, child_id, num_tokens)
        if copies is not None:
            assert [source for source, _ in copies] == table[num_tokens // size :][: num_tokens % size > 0]
            assert self.manager.block_table(child_id)[: num_tokens // size] == table[: num_tokens // size]
            self.copy(copies, self.slots, self.slots)
            self.tokens[child_id] = self.tokens[parent_id][:num_tokens]
            self.salts[child_id], self.num_computed[child_id] = self.salts[parent_id], num_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def swap_out(self, data):
        request_id = self.choose(data)
        table = self.manager.block_table(request_id)
        copies = self.unchanged(self.manager.swap_out, request_id)
        if copies is not None:
            assert [block_id for block_id, _ in copies] == table
            self.copy(copies, self.slots, self.host_slots)
            self.swapped.append(request_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        request_id = self.choose(data, swapped=True)
        copies = self.unchanged(self.manager.swap_in, request_id)
        if copies is not None:
            self.copy(copies, self.host_slots, self.slots)
            assert [block_id for _, block_id in copies] == self.manager.block_table(request_id)
            self.swapped.remove(request_id)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        request_id = data.draw(st.sampled_from(list(self.tokens)))
        self.manager.free(request_id)
        self.manager.free(request_id)
        self.swapped = [other for other in self.swapped if other != request_id]
        for books in (self.tokens, self.salts, self.num_computed):
            del books[request_id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(0, 200))
    def forget(self, data, num_tokens):
        request_id = data.draw(st.sampled_from(list(self.tokens)))
        tokens, salt, size = self.tokens[request_id], self.salts[request_id], self.manager.block_size
        before = self.manager.num_free_blocks
        self.manager.forget_prefix(tokens, num_tokens, salt)
        assert self.manager.num_free_blocks == before
        _, num_found = self.manager.get_computed_blocks("somebody", [*tokens, 0], salt)
        assert num_found <= num_tokens // size * size

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.held)

    @rule(num_blocks=st.integers(2, 50))
    def resize(self, num_blocks):
        used = {block_id for request_id in self.held for block_id in self.manager.block_table(request_id)}
        assert self.manager.resize(num_blocks) == all(block_id < num_blocks for block_id in used)

    @rule(data=st.data())
    def misuse(self, data):
        before = self.manager.stats()
        calls = [
            (UnknownRequestError, self.manager.swap_out, "nobody"),
            (UnknownRequestError, self.manager.swap_in, "nobody"),
            (UnknownRequestError, self.manager.fork, "nobody", "child", 1),
            (UnknownRequestError, self.manager.cache_blocks, "nobody", [1], 1),
            (ValueError, self.manager.resize, 0),
            (ValueError, self.manager.allocate_slots, "new", 0),
            (ValueError, self.manager.allocate_slots, "new", 1, [10**6]),
            (ValueError, self.manager.allocate_slots, "new", 1, [-1]),
        ]
        if self.held:
            one = self.choose(data)
            num_slots = len(self.manager.block_table(one)) * self.manager.block_size
            calls += [
                (DuplicateRequestError, self.manager.fork, one, one, 1),
                (ValueError, self.manager.fork, one, "child", num_slots + 1),
                (ValueError, self.manager.fork, one, "child", 0),
                (ValueError, self.manager.cache_blocks, one, [0] * (num_slots + 1), num_slots + 1),
                (ValueError, self.manager.cache_blocks, one, [0], -1),
                (UnknownRequestError, self.manager.swap_in, one),
            ]
        if self.swapped:
            calls.append((DuplicateRequestError, self.manager.allocate_slots, self.swapped[0], 1))
        for error, function, *arguments in calls:
            try:
                function(*arguments)
            except error:
                pass
            else:
                raise AssertionError(f"{function.__name__}{arguments} is not refused")
        assert self.manager.stats() == before

    @invariant()
    def the_books_agree(self):
        self.manager.check_integrity()
        used = {block_id for request_id in self.held for block_id in self.manager.block_table(request_id)}
        assert self.manager.num_free_blocks + len(used) == self.manager.num_blocks

    @invariant()
    def every_table_leads_to_its_own_tokens(self):
        size = self.manager.block_size
        for request_id in self.held:
            table, tokens = self.manager.block_table(request_id), self.tokens[request_id]
            for position in range(self.num_computed[request_id]):
                written = self.slots[table[position // size], position % size]
                assert written == (self.salts[request_id], tuple(tokens[: position + 1]))

    @invariant()
    def a_router_knows_what_can_be_found(self):
        known = self.known_to_router
        events, num_dropped = self.manager.fetch_events()
        assert not num_dropped or self.max_events == 3
        for event in events if self.max_events > 3 else ():
            if type(event).__name__ == "AllCleared":
                known.clear()
            elif type(event).__name__ == "BlockRemoved":
                for identity in event.identities:
                    del known[identity]
            else:
                assert len(event.token_ids) == len(event.identities) * self.manager.block_size
                for i, identity in enumerate(event.identities):
                    assert identity not in known
                    known[identity] = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
        assert self.max_events <= 3 or len(known) == self.manager.stats().num_cached_blocks

    def teardown(self):
        if hasattr(self, "manager"):
            for request_id in self.tokens:
                self.manager.free(request_id)
            assert self.manager.num_free_blocks == self.manager.num_blocks
            assert self.manager.num_free_host_blocks == self.manager.num_host_blocks
            assert self.manager.reset_prefix_cache()
            self.manager.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
