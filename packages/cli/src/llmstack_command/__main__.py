"""`python -m llmstack_command`: the command without an installed script."""

from __future__ import annotations

import sys

from llmstack_command.main import main

if __name__ == "__main__":
    sys.exit(main())
