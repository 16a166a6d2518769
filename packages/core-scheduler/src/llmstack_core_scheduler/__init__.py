"""A continuous-batching scheduler as a pure function: one token budget, chunked prefill, preemption by recompute."""
