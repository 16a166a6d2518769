"""Child process of a comparison between installations.

It runs as `python -m llmstack_step_log.replay.child LOG`.
"""

from __future__ import annotations

import sys

from llmstack_step_log import StepLogError, read_step_log
from llmstack_step_log.packing import pack
from llmstack_step_log.replay.against import decisions_as_recorded


def main(arguments: list[str]) -> int:
    """Writes every decision to standard output, as msgpack."""
    try:
        for decision in decisions_as_recorded(read_step_log(arguments[0])):
            sys.stdout.buffer.write(pack((decision.step, decision.now_us, decision.packed)))
    except StepLogError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
