"""Commands inside a conversation, such as `/system` and `/save`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from llmstack_command.errors import ApiError

MAX_VALUE = 1e18
SETTINGS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
HELP = """\
/system TEXT      instructions before the conversation; without TEXT it shows them, and `/system -` removes them
/set NAME VALUE   a sampling setting, such as `/set temperature 0`; `/set NAME` resets it, `/set` shows all
/model NAME       another model of the server; without NAME it lists them
/clear            forgets the conversation
/save FILE        writes the conversation, as Markdown if FILE ends in .md, else as JSON
/help             this list
/exit, /quit      ends the conversation, as Ctrl-D
//text            a message that starts with a slash
\"\"\"               begins and ends a message of several lines; a line that ends in a backslash goes on, too
Ctrl-C            ends an answer, Ctrl-D the conversation"""


class ConversationEnd(Exception):
    """The user has ended the conversation by a command."""


class Conversation:
    """The messages and settings of a conversation, which commands change.

    Attributes:
        messages: The messages to send, the system prompt first.
        body: The model's name, and the sampling fields of every request.
    """

    def __init__(self, body: dict[str, Any], system_prompt: str | None = None) -> None:
        self.body = body
        self.messages: list[dict[str, str]] = []
        if system_prompt is not None:
            self.messages.append({"role": "system", "content": system_prompt})

    @property
    def system_prompt(self) -> str | None:
        """The instructions before the conversation."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def set_system_prompt(self, text: str | None) -> None:
        """Changes or removes the instructions; the messages after them stay."""
        rest = self.messages[1:] if self.system_prompt is not None else self.messages
        self.messages[:] = ([] if text is None else [{"role": "system", "content": text}]) + rest

    def clear(self) -> None:
        """Forgets all messages but the instructions."""
        del self.messages[0 if self.system_prompt is None else 1 :]


class ChatCommands:
    """Runs the commands of a user."""

    def __init__(self, conversation: Conversation, model_names: Callable[[], Sequence[str]]) -> None:
        """`model_names` asks the server; it may raise ApiError."""
        self._conversation = conversation
        self._model_names = model_names
        self._commands: Mapping[str, Callable[[str], str]] = {
            "help": lambda text: HELP,
            "?": lambda text: HELP,
            "system": self._system,
            "set": self._set,
            "model": self._model,
            "clear": self._clear,
            "save": self._save,
            "exit": _end,
            "quit": _end,
        }

    def run(self, line: str) -> str:
        """The text to show for a line that starts with one slash.

        Raises:
            ApiError: There is no such command, or it cannot be done; the text says why.
            ConversationEnd: It was the last one.
        """
        name, _, text = line[1:].strip().partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise ApiError(f"there is no command /{name[:32]}; /help lists them, //text sends a text with a slash")
        return command(text.strip())

    def _system(self, text: str) -> str:
        if not text:
            return self._conversation.system_prompt or "no instructions"
        self._conversation.set_system_prompt(None if text == "-" else text)
        return "instructions removed" if text == "-" else "instructions set"

    def _set(self, text: str) -> str:
        body, (name, _, value) = self._conversation.body, text.partition(" ")
        if not name:
            given = [f"{key} {body[key]}" for key in SETTINGS if key in body]
            return "\n".join(given) or f"the server's settings; known are {', '.join(SETTINGS)}"
        if name not in SETTINGS:
            raise ApiError(f"/set: there is no setting {name[:32]}; known are {', '.join(SETTINGS)}")
        if not value.strip():
            body.pop(name, None)
            return f"{name}: the server's"
        try:
            number = SETTINGS[name](value)
        except ValueError:
            raise ApiError(f"/set: {value.strip()[:32]} is no value for {name}") from None
        if not abs(number) <= MAX_VALUE:
            raise ApiError(f"/set: {value.strip()[:32]} is no value for {name}")
        body[name] = number
        return f"{name} {number}"

    def _model(self, name: str) -> str:
        names = self._model_names()
        if not name:
            return "\n".join(f"{'*' if entry == self._conversation.body['model'] else ' '} {entry}" for entry in names)
        if name not in names:
            raise ApiError(f"/model: the server has no {name[:64]}; it has {', '.join(names[:8])}")
        self._conversation.body["model"] = name
        return f"model {name}"

    def _clear(self, text: str) -> str:
        self._conversation.clear()
        return "the conversation is forgotten"

    def _save(self, name: str) -> str:
        if not name:
            raise ApiError("/save: name a file")
        path, messages = Path(name).expanduser(), self._conversation.messages
        text = (
            as_markdown(messages) if path.suffix == ".md" else json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        )
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ApiError(f"/save: {path} is there already; name another file") from None
        except OSError as error:
            raise ApiError(f"/save: {path}: {error.strerror}") from None
        return f"{len(messages)} messages are in {path}"


def _end(text: str) -> NoReturn:
    raise ConversationEnd


def as_markdown(messages: Sequence[Mapping[str, str]]) -> str:
    """The messages with a heading each."""
    return "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in messages)
