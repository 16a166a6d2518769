"""Subcommands of `llmstack`; light, since `llmstack --help` imports them."""

from llmstack_server.commands.logprobs_command import LogprobsCommand
from llmstack_server.commands.receipt_commands import ReceiptKeyCommand, VerifyCommand
from llmstack_server.commands.subcommands import RunBatchCommand, ServeCommand, TranscribeCommand

__all__ = [
    "LogprobsCommand",
    "ReceiptKeyCommand",
    "RunBatchCommand",
    "ServeCommand",
    "TranscribeCommand",
    "VerifyCommand",
]
