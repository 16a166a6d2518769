"""A scheduler on a clock that goes on with the work of its steps."""

from core_scheduler_helpers.steps import answer, make_request, make_scheduler, rows_of

SIZES = {"num_blocks": 600, "max_num_batched_tokens": 2048, "max_model_len": 8192, "max_num_seqs": 64}


class Machine:
    """Takes a time for a step that is linear in its work.

    `messages` are those of the last step.
    """

    def __init__(self, base_s=0.01, prompt_s=0.002, decode_s=0.001, pair_s=1e-7, **config):
        self.costs = base_s, prompt_s, decode_s, pair_s
        self.scheduler = make_scheduler(**(SIZES | config))
        self.now_s = 0.0
        self.messages = []

    def add(self, name, num_tokens, max_tokens=100, **arrival):
        self.scheduler.add_request(make_request(name, num_tokens, max_tokens, **arrival))

    def step(self):
        """The tokens of each row, the time of the step, and that of its decodes alone."""
        base_s, prompt_s, decode_s, pair_s = self.costs
        scheduled = self.scheduler.schedule(self.now_s)
        rows = scheduled.scheduled_requests
        decodes = [row for row in rows if row.num_scheduled_tokens == 1]
        streams_s = base_s + sum(decode_s + pair_s * row.num_computed_tokens for row in decodes)
        seconds = streams_s
        for row in rows:
            num_tokens = row.num_scheduled_tokens
            if num_tokens > 1:
                seconds += num_tokens * (prompt_s + pair_s * (row.num_computed_tokens + num_tokens / 2))
        self.now_s += seconds
        self.messages = self.scheduler.update_from_output(scheduled, answer(scheduled), self.now_s).outputs
        return rows_of(scheduled), seconds, streams_s

    def learn(self):
        """Runs a few requests of several lengths, one after the other and together."""
        for number in range(6):
            self.add(f"learn-{number}", 20 + 30 * number, 12)
            for _ in range(6):
                self.step()
        while self.scheduler.has_unfinished_requests():
            self.step()
