"""Random draws in native code, against rows that are sorted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kernels import draw_tokens as op
from llmstack_kernels.draw_tokens import DrawParameters, native, reference
from llmstack_kernels.native import is_available

needs_native = pytest.mark.skipif(not is_available(), reason="the native kernels are not built")
OFF = 1 << 31


def parameters(num_rows: int, *, top_k: int = OFF, top_p: float = 1.0, min_p: float = 0.0) -> DrawParameters:
    generator = torch.Generator().manual_seed(num_rows)
    return DrawParameters(
        rows=torch.arange(num_rows),
        temperature=torch.rand(num_rows, generator=generator) * 1.5 + 0.1,
        min_p=torch.full((num_rows,), min_p),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64),
        uniforms=torch.rand(num_rows, generator=generator, dtype=torch.float64),
    )


@needs_native
@settings(deadline=None)
@given(
    st.sampled_from([1, 7, 100, 1000, 5_000]),
    st.sampled_from([0.5, 3.0, 8.0]),
    st.sampled_from([1, 50, 256, 257, 600, OFF]),
    st.sampled_from([1e-9, 0.3, 0.95, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.integers(0, 100),
)
def test_tokens_are_those_of_the_reference(
    vocab_size: int, scale: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """With the many equal logits that bfloat16 has."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    logits = logits.bfloat16().float()
    logits[1, : vocab_size // 2] = -torch.inf  # masked
    logits[1, -1] = 0.0
    chosen = parameters(6, top_k=top_k, top_p=top_p, min_p=min_p)
    best = logits.amax(dim=-1)
    tokens = native.draw_tokens(logits, best, chosen)
    assert torch.equal(tokens, reference.draw_tokens(logits, best, chosen))
    alone = [
        native.draw_tokens(logits, best, DrawParameters(*[getattr(chosen, name)[row : row + 1] for name in FIELDS]))
        for row in range(6)
    ]
    assert torch.equal(tokens, torch.cat(alone))


FIELDS = ("rows", "temperature", "min_p", "top_k", "top_p", "uniforms")


@needs_native
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_largest_number_get_a_valid_token(value: float, top_p: float) -> None:
    logits = torch.full((2, 300), -1.0)
    logits[0] = value
    logits[1, 5] = value
    tokens = native.draw_tokens(logits, logits.amax(dim=-1), parameters(2, top_p=top_p, top_k=40))
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_draws_follow_the_distribution() -> None:
    """Uniform numbers at equal distances: each token comes as often as its probability says, within one."""
    logits, count = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, 1.5]]), 1000
    one = parameters(1)
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    columns = [getattr(one, name).expand(count).contiguous() for name in FIELDS[1:5]]
    drawn = op.draw_tokens(logits, logits.amax(dim=-1), DrawParameters(one.rows.new_zeros(count), *columns, numbers))
    expected = (logits[0] / one.temperature).softmax(dim=-1) * count
    assert (torch.bincount(drawn, minlength=5) - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("logits", "best"),
    [
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2)),
        (torch.zeros(4, 2).t(), torch.zeros(2)),
        (torch.zeros(2, 4), torch.zeros(3)),
        (torch.zeros(2, 0), torch.zeros(2)),
    ],
)
def test_shapes_and_types_that_do_not_fit_are_refused(logits: torch.Tensor, best: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        op.draw_tokens(logits, best, parameters(2))
