"""The subcommands `llmstack verify` and `llmstack receipt-key`."""

from __future__ import annotations

import argparse
import sys


class VerifyCommand:
    """The subcommand `llmstack verify RECEIPT`."""

    name = "verify"
    help = "check the signature of a receipt, and compute its tokens again"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from pathlib import Path  # late: other commands do without it

        parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="a receipt, or an answer that has one")
        parser.add_argument("--model", help="the model, as `serve` takes it (default: what `serve` takes without one)")
        parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="the LoRA adapter that the receipt names")
        parser.add_argument("--public-key", metavar="KEY", help="the key that must have signed it, in base64")
        parser.add_argument("--signature-only", action="store_true", help="compute nothing")

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints what was found; returns 0 if all is as the receipt says, else 1."""
        from llmstack_llm.engine_args import EngineArgsError
        from llmstack_model_files import ModelFilesError
        from llmstack_server.commands.verify import read_receipt, reloads_of, verify
        from llmstack_server.options.errors import ServeError
        from llmstack_server.serving.launcher import model_of
        from llmstack_server.web.receipts import ReceiptError, check_signature
        from llmstack_types import LLMStackError

        try:
            receipt = read_receipt(namespace.receipt)
            check_signature(receipt)
            if namespace.public_key not in (None, receipt["public_key"]):
                raise ReceiptError(f"another key has signed it: {receipt['public_key']}")
            sys.stdout.write(_shown(f"signed by {receipt['public_key']}", *reloads_of(receipt)))
            if namespace.signature_only:
                return 0
            differences = verify(receipt, model_of(namespace.model), namespace.adapter)
        except (ReceiptError, EngineArgsError, ModelFilesError, ServeError, LLMStackError) as error:
            sys.stderr.write(_shown(f"llmstack verify: error: {error}"))
            return 1
        sys.stdout.write(_shown(*differences) or "all tokens are equal\n")
        return 1 if differences else 0


class ReceiptKeyCommand:
    """The subcommand `llmstack receipt-key FILE`."""

    name = "receipt-key"
    help = "make a key that signs receipts"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from pathlib import Path  # late: other commands do without it

        parser.add_argument("file", type=Path, metavar="FILE", help="a new file for the private key")

    def run(self, namespace: argparse.Namespace) -> int:
        """Writes the private key, and prints the public one."""
        from llmstack_server.web.receipts import ReceiptError, make_key

        try:
            public_key = make_key(namespace.file)
        except ReceiptError as error:
            sys.stderr.write(f"llmstack receipt-key: error: {error}\n")
            return 1
        sys.stdout.write(f"{public_key}\n")
        return 0


def _shown(*lines: str) -> str:
    """Lines as a terminal may show them: texts of a receipt may have control characters."""
    return "".join("".join(char if char.isprintable() else " " for char in line) + "\n" for line in lines)
