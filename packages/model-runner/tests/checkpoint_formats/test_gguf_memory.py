"""Memory while a file's tables of tokens are loaded: little beside the table itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_runner_helpers.gguf_models import SIZES, meaning, random_data, write_model

from llmstack_model_runner.checkpoint_formats.gguf import read_gguf
from llmstack_model_runner.layers.embedding import Embedding
from llmstack_model_runner.models.base import _fill

NUM_TOKENS = 1 << 18
PIECES = 96 << 20
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(field: str) -> int:
    """Memory of this process: `VmRSS` now, `VmHWM` at most since the last reset."""
    (line,) = (line for line in STATUS.read_text("ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not RESET.exists(), reason="the kernel counts no peaks")
@pytest.mark.parametrize("kind", ["Q6_K", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("Q2_K", "F16"))])
def test_a_table_is_widened_in_pieces(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "vocab", NUM_TOKENS)
    path = tmp_path / "model.gguf"
    write_model(path, "qwen2", lambda name: kind if name == "token_embd.weight" else "Q8_0", is_tied=True)
    weights = dict(read_gguf([path], SIZES["hidden"] // SIZES["heads"]))
    device, name = torch.device("cpu"), "model.embed_tokens"
    table = Embedding(name, NUM_TOKENS, SIZES["hidden"], dtype=torch.bfloat16, device=device, is_vocabulary=True)
    RESET.write_text("5", "ascii")  # the highest is from now on
    before = resident_bytes("VmRSS")
    assert not _fill(table.slots()[f"{name}.weight"], name, weights[f"{name}.weight"])
    grown = resident_bytes("VmHWM") - before
    assert grown < table.weight.nbytes + path.stat().st_size + PIECES
    rows = torch.tensor([0, 77, NUM_TOKENS - 1])
    data = random_data(kind, (NUM_TOKENS, SIZES["hidden"]), seed=0)[rows.numpy()]
    torch.testing.assert_close(table(rows), meaning(data, kind).bfloat16(), rtol=2**-8, atol=1e-6)
