"""The queue of free blocks behaves like a plain list."""

from hypothesis import given
from hypothesis import strategies as st

from llmstack_kv_cache.free_block_queue import FreeBlockQueue

operations = st.lists(
    st.tuples(
        st.sampled_from(["take", "remove", "append", "prepend"]), st.integers(0, 7), st.randoms(use_true_random=False)
    )
)


@given(num_blocks=st.integers(1, 12), operations=operations)
def test_any_sequence_of_operations_equals_that_on_a_list(num_blocks, operations):
    queue, model, outside = FreeBlockQueue(num_blocks), list(range(num_blocks)), []
    for name, amount, random in operations:
        if name == "take":
            amount = min(amount, len(model))
            taken = queue.take(amount)
            assert taken == model[:amount]
            del model[:amount]
            outside += taken
        elif name == "remove":
            chosen = random.sample(model, min(amount, len(model)))
            queue.remove(chosen)
            model = [block_id for block_id in model if block_id not in chosen]
            outside += chosen
        else:
            chosen = random.sample(outside, min(amount, len(outside)))
            outside = [block_id for block_id in outside if block_id not in chosen]
            if name == "append":
                queue.append(chosen)
                model = model + chosen
            else:
                queue.prepend(chosen)
                model = chosen + model
        assert list(queue) == model
        assert list(reversed(queue)) == model[::-1]
        assert len(queue) == len(model)
