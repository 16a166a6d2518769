"""The source of an answer's events: outputs with cuts, and drawn values."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from llmstack_llm import RequestOutput

OTHER_TEXT = "The answer cannot go on: its text is another one since the restart."

Value = TypeVar("Value", str, int)


class OtherTextError(Exception):
    """The second run of a request differs from what its reader may have seen of the first."""


class Piece(NamedTuple):
    """The new tokens of one completion, and whether it ends with them."""

    completion: int
    is_last: bool
    token_ids: tuple[int, ...]


class Cut(NamedTuple):
    """The pieces of one output, as its answer took them."""

    prompt_index: int
    pieces: tuple[Piece, ...]


class AnswerSource:
    """Tokens, cuts and drawn values of one answer: a second run of its request has the same events, one by one.

    Attributes:
        values: Ids and times that the first run has drawn, and the cached tokens that it has found.
        is_second_run: Whether a run before has begun the answer.
        is_other: Whether the second run had another text.
        is_repeatable: Whether another run has the same tokens: the numeric contract holds, for a single completion.
        follows: Whether all that the database lacks follows from what it has: such a run has the same tokens, one an
            output.
    """

    def __init__(self, values: Iterable[str | int] = (), cuts: bytes = b"") -> None:
        """`cuts`: As of `cuts_after`, where an earlier server has begun the answer.

        Raises:
            ValueError: They are no whole numbers.
        """
        self.values = list(values)
        self.is_other = self.follows = False
        self.is_repeatable = False
        self._expected_end = 0  # the cuts after these are one token each
        # Per output the number of its pieces and the prompt; per piece index, end, the number of tokens, and these.
        self._numbers = array("I")
        self._numbers.frombytes(cuts)
        self._num_drawn = self._position = 0
        self._num_cut = len(self._numbers)
        self.is_second_run = bool(cuts)

    def begin_again(self) -> None:
        """Begins a run that repeats the values and cuts of the run before."""
        self._num_drawn = self._position = 0
        self._num_cut = len(self._numbers)
        self.is_second_run = True

    @property
    def num_bytes(self) -> int:
        """The size of the cuts: 24 bytes for an output of one token."""
        return len(self._numbers) * self._numbers.itemsize

    def note_written(self, num_values: int, num_bytes: int) -> None:
        """The database has so many values and bytes of cuts."""
        self.follows = self.is_repeatable and num_values == len(self.values) and num_bytes >= self._expected_end

    def cuts_after(self, num_bytes: int) -> bytes:
        """The cuts but for the first `num_bytes`."""
        return self._numbers[num_bytes // self._numbers.itemsize :].tobytes()

    def lasting(self, value: Value) -> Value:
        """A value that is drawn at this place of each run: that of the first run.

        Raises:
            OtherTextError: The first run has drawn something else here.
        """
        if self._num_drawn == len(self.values):
            self.values.append(value)
            self.follows = False
        found = self.values[self._num_drawn]
        self._num_drawn += 1
        if isinstance(found, type(value)):
            return found
        raise OtherTextError

    def note(self, output: RequestOutput) -> int:
        """Adds an output that the answer takes; for `take_back`, the size before."""
        numbers, outputs = self._numbers, output.outputs
        size = len(numbers)
        if len(outputs) == 1 and len(output.engines) < 2:
            one = outputs[0]
            if len(one.token_ids) == 1:
                is_last = one.finish_reason is not None
                numbers.extend((1, output.prompt_index, one.index, is_last, 1, one.token_ids[0]))
                return size
        numbers.extend((len(outputs), output.prompt_index))
        for one in outputs:
            numbers.extend((one.index, one.finish_reason is not None, len(one.token_ids)))
            numbers.extend(one.token_ids)
        self.follows, self._expected_end = False, self.num_bytes
        return size

    def take_back(self, size: int) -> None:
        """Removes the output that the answer has refused."""
        del self._numbers[size:]

    @property
    def is_repeating(self) -> bool:
        """Whether there are further cuts to repeat."""
        return self._position < self._num_cut

    def next_cut(self) -> Cut:
        """The next cut to repeat."""
        num_pieces, prompt_index = self._take(2)
        return Cut(prompt_index, tuple(self._pieces(num_pieces)))

    def token_ids(self) -> dict[tuple[int, int], list[int]]:
        """The tokens so far, by prompt and completion."""
        found: dict[tuple[int, int], list[int]] = {}
        every = AnswerSource(cuts=self.cuts_after(0))
        while every.is_repeating:
            cut = every.next_cut()
            for piece in cut.pieces:
                found.setdefault((cut.prompt_index, piece.completion), []).extend(piece.token_ids)
        return found

    def _pieces(self, count: int) -> Iterator[Piece]:
        for _ in range(count):
            index, is_last, num_tokens = self._take(3)
            yield Piece(index, bool(is_last), tuple(self._take(num_tokens)))

    def _take(self, count: int) -> array[int]:
        found = self._numbers[self._position : self._position + count]
        self._position += count
        if len(found) < count:
            raise OtherTextError
        return found


current_source: ContextVar[AnswerSource | None] = ContextVar("current_source", default=None)
"""The source of the answer that the task generates; None where it is not kept."""


def lasting(value: Value) -> Value:
    """A value that each run of the current answer draws: that of its first run."""
    source = current_source.get()
    return value if source is None else source.lasting(value)
