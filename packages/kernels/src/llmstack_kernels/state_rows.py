"""The rows of a step whose layers keep a state of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step, with the states at their beginnings and at their ends.

    Row i owns the tokens [query_start_loc[i], query_start_loc[i + 1]). It reads block `sources[i]`, and the state after
    its known tokens is written to block `targets[i]`. Its drafts, which follow the known tokens, change no block. No
    row reads what another one writes, nor what it writes itself.
    """

    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    sources: torch.Tensor  # [num_rows] int64
    targets: torch.Tensor  # [num_rows] int64
    num_known_tokens: torch.Tensor  # [num_rows] int64, of the step
    _places: dict[int, Places] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sources)

    def places(self, width: int) -> Places:
        """The places of tokens in a tensor with `width` places before the tokens of each row; computed once per step.

        Returns:
            The places of the tokens [num_tokens], those before each row [num_rows, width], and the last ones up to its
            known tokens [num_rows, width].
        """
        if width not in self._places:
            starts, num_rows = self.query_start_loc[:-1].long(), len(self.sources)
            counts = self.query_start_loc.diff().long()
            before = starts + torch.arange(num_rows, device=starts.device) * width
            tokens = torch.arange(int(self.query_start_loc[-1]), device=starts.device)
            shifts = torch.repeat_interleave(before + width - starts, counts)
            span = torch.arange(width, device=starts.device)
            ends = before + self.num_known_tokens
            self._places[width] = tokens + shifts, before[:, None] + span, ends[:, None] + span
        return self._places[width]

    def scan(
        self,
        states: torch.Tensor,  # [num_blocks, *shape]; the targets' blocks are written
        out: torch.Tensor,  # [num_tokens, *shape of an answer]
        take_in: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Every row token by token: `take_in` gives the state behind a token, and the token's answer; returns `out`.

        PyTorch's functions have other bits for the last numbers of a tensor, so no tensor holds several tokens.
        """
        starts, known = self.query_start_loc.tolist(), self.num_known_tokens.tolist()
        for row, (source, target) in enumerate(zip(self.sources.tolist(), self.targets.tolist(), strict=True)):
            state = states[source].clone()
            for number, token in enumerate(range(starts[row], starts[row + 1])):
                if number == known[row]:
                    states[target] = state
                state, out[token] = take_in(token, state)
            if known[row] == starts[row + 1] - starts[row]:
                states[target] = state
        return out

    def check(self, num_tokens: int) -> None:
        """ValueError unless the tensors describe rows of `num_tokens` tokens, by their shapes and types."""
        num_rows = len(self.sources)
        others = (self.sources, self.targets, self.num_known_tokens)
        if self.query_start_loc.shape != (num_rows + 1,) or self.query_start_loc.dtype != torch.int32:
            raise ValueError(f"query_start_loc must be int32 [{num_rows + 1}], got {self.query_start_loc.shape}.")
        if any(tensor.shape != (num_rows,) or tensor.dtype != torch.int64 for tensor in others):
            raise ValueError(f"sources, targets and num_known_tokens must be int64 [{num_rows}].")
        if num_rows > num_tokens:
            raise ValueError(f"{num_rows} rows have no more than {num_tokens} tokens.")
