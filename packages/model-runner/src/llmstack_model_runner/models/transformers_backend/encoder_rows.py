"""Runs of an encoder of transformers over rows: packed, or of one length."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from llmstack_model_runner.models.transformers_backend.row_attention import RowAttention

_MOST_SCORES = 1 << 24
"""Scores of one layer that a call computes at most, unless one row alone has more: 64 MiB in float32."""


class EncoderCode:
    """The forward of an encoder, with the arguments that it takes.

    Attributes:
        takes_positions: Whether it reads positions of tokens.
        output_class: The class of its outputs, once it has run.
    """

    def __init__(self, model: nn.Module, first_position: int, num_token_types: int) -> None:
        names = inspect.signature(model.forward).parameters
        self._model = model
        self._first_position = first_position
        self.takes_positions = "position_ids" in names
        self.output_class: type[Any] = dict
        self._takes_types = "token_type_ids" in names and num_token_types > 1

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor | None = None, token_types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [num_rows, length, hidden_size]; the arguments are [num_rows, length].

        Without positions the model counts them itself.
        """
        more: dict[str, Any] = {}
        if positions is not None and self.takes_positions:
            more["position_ids"] = positions + self._first_position
        if token_types is not None and self._takes_types:
            more["token_type_ids"] = token_types
        output = self._model(input_ids=token_ids, return_dict=True, **more)
        self.output_class = type(output)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden


class RowsRun(Protocol):
    """A way to run an encoder over the rows of a step."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, starts: list[int],
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states [num_tokens, hidden_size] of rows that begin at `starts`; tensors are [num_tokens]."""


class PackedRows:
    """Rows packed into one, whose attention knows the start of each.

    A call has no more tokens than a prompt may have, since some code refuses longer ones whatever their positions are.
    """

    def __init__(self, code: EncoderCode, attention: RowAttention, num_positions: int) -> None:
        self._code, self._attention, self._num_positions = code, attention, num_positions

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, starts: list[int],
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Computes rows, as `RowsRun` says, in as few calls of the model as there can be."""
        parts: list[list[int]] = [[starts[0]]]
        for start, end in pairwise(starts):
            if end - parts[-1][0] > self._num_positions and start > parts[-1][0]:
                parts.append([start])
            parts[-1].append(end)
        hidden = []
        for part in parts:
            tokens = slice(part[0], part[-1])
            self._attention.begin([start - part[0] for start in part])
            types = None if token_types is None else token_types[None, tokens]
            hidden.append(self._code(token_ids[None, tokens], positions[None, tokens], types)[0])
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)


class EqualRows:
    """Rows of one length as a batch without padding, by the model's own attention."""

    def __init__(self, code: EncoderCode, num_heads: int) -> None:
        self._code, self._num_heads = code, num_heads

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, starts: list[int],
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Computes rows, as `RowsRun` says, in one call of the model for each length, or in several for many scores."""
        length_to_firsts: dict[int, list[int]] = {}
        for start, end in pairwise(starts):
            length_to_firsts.setdefault(end - start, []).append(start)
        hidden = None
        for length, firsts in length_to_firsts.items():
            most = max(1, _MOST_SCORES // (self._num_heads * length * length))
            for index in range(0, len(firsts), most):
                begins = torch.tensor(firsts[index : index + most], device=token_ids.device)
                places = begins[:, None] + torch.arange(length, device=token_ids.device)
                types = None if token_types is None else token_types[places]
                states = self._code(token_ids[places], positions[places], types)
                if hidden is None:
                    hidden = states.new_empty(len(token_ids), states.shape[-1])
                hidden[places.flatten()] = states.flatten(0, 1)
        if hidden is None:
            raise ValueError("there are no rows")
        return hidden
