"""Rules of a state machine that steps a scheduler, whose model says what each answer is."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmstack_core_scheduler.testing import next_token, seen_ids


class SteppedMachine(RuleBasedStateMachine):
    """Schedule, execute and update are rules of their own, so that all else falls in between, and steps overlap.

    A subclass makes `scheduler`, `manager`, `runner`, and empty `under_way`, `requests` and `answers`; it has rules
    that add requests, and `schedule`.
    """

    @precondition(lambda self: self.under_way)
    @rule()
    def update(self):
        for message in self.scheduler.update_from_output(*self.under_way.pop(0), 0.0).outputs:
            request, answer = self.requests[message.request_id], self.answers[message.request_id]
            seen = seen_ids(request.prompt_token_ids, request.media)
            for token_id in message.new_token_ids:
                assert token_id == next_token(seen + answer)
                answer.append(token_id)
            if message.finish_reason is not None:
                assert len(answer) == request.sampling_params.max_tokens
                del self.requests[message.request_id]

    @rule(number=st.integers(0, 25))
    def abort(self, number):
        self.scheduler.abort_requests([str(number)])
        self.requests.pop(str(number), None)

    @rule()
    def reset_prefix_cache(self):
        assert self.scheduler.reset_prefix_cache() == (not self.scheduler.running)

    @invariant()
    def every_request_is_in_one_state(self):
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        assert sorted(r.request_id for r in running + waiting) == sorted(self.requests)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            while self.under_way:
                self.update()
            if not self.scheduler.has_unfinished_requests():
                break
            self.schedule()
        assert not self.requests
        assert self.runner.request_ids == []
        assert self.manager.num_free_blocks == self.manager.num_blocks
