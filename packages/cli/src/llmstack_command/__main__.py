"""`python -m llmstack_command`: the command where its script is not installed."""

from __future__ import annotations

import sys

from llmstack_command.main import main

if __name__ == "__main__":
    sys.exit(main())
