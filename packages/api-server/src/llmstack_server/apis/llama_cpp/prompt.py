"""Prompts with a gap and other files around it, as llama.cpp puts them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from llmstack_llm import request_errors
from llmstack_server.apis.llama_cpp.protocol import DEFAULT_FILE_NAME, InfillRequest, check_texts
from llmstack_server.apis.openai.infilling import PREFIX, SUFFIX, GapForm, form_of, gap_ids
from llmstack_server.state.server_state import ServerState
from llmstack_types.json_values import JSONObject

if TYPE_CHECKING:
    from llmstack_llm.text.tokenizer import Tokenizer

# As llama.cpp names what no field does.
_REPOSITORY: Final = "myproject\n"
_FILE: Final = "filename\n"
_SNIPPET: Final = "snippet"


class GapPrompt(NamedTuple):
    """A prompt as token ids, and the tokens after which a gap is filled."""

    token_ids: list[int]
    end_ids: list[int]


async def gap_prompt(state: ServerState, fields: InfillRequest) -> GapPrompt:
    """The texts around the gap in the form of the model, after the other files.

    The form is the one that llama.cpp documents. A model without tokens of files gets each file after a line with its
    name. `prompt` comes last: the answer continues it.

    Raises:
        InvalidRequestError: A text is missing or too long, or the model has no tokens for this.
    """
    prefix, suffix = check_texts(fields)
    tokenizer = await state.engine.get_tokenizer("input_prefix")
    form = form_of(tokenizer)
    if form is None:
        raise request_errors.unsupported_value("input_prefix", "this model has no tokens for the text around a gap")
    first = [] if fields.add_special_tokens is False else await state.engine.tokenize("", add_special_tokens=True)
    token_ids = [*first, *await _files(state, tokenizer, form, fields.input_extra or [])]
    before = await _tokens(state, prefix, "input_prefix")
    after = await _tokens(state, suffix, "input_suffix")
    token_ids += gap_ids(tokenizer, form, before, after)
    token_ids += await _tokens(state, fields.prompt or "", "prompt")
    return GapPrompt(token_ids, _end_ids(tokenizer, form))


async def _files(state: ServerState, tokenizer: Tokenizer, form: GapForm, files: list[JSONObject]) -> list[int]:
    token_ids: list[int] = []
    if form.file:
        token_ids = [*_ids(tokenizer, form.repository), *await _tokens(state, _REPOSITORY, "input_extra")]
    for index, file in enumerate(files):
        param = f"input_extra[{index}]"
        if form.file:
            name = f"{file.get('filename', DEFAULT_FILE_NAME)}\n"
            token_ids += [*_ids(tokenizer, form.file), *await _tokens(state, name, f"{param}.filename")]
        else:
            name = f"\n\n--- {file.get('filename', _SNIPPET)} ---\n\n"
            token_ids += await _tokens(state, name, f"{param}.filename")
        token_ids += await _tokens(state, file.get("text", ""), f"{param}.text")
    if form.file:
        token_ids += [*_ids(tokenizer, form.file), *await _tokens(state, _FILE, "input_extra")]
    return token_ids


async def _tokens(state: ServerState, text: str, param: str) -> list[int]:
    """The tokens of a text, in which nothing is a token of the form."""
    if not text:
        return []
    return await state.engine.tokenize(text, add_special_tokens=False, param=param, has_controls=False)


def _end_ids(tokenizer: Tokenizer, form: GapForm) -> list[int]:
    """The special tokens of the form: after the gap a model says that it ends, or begins another file or gap."""
    names = [part for part in form.parts if part not in (PREFIX, SUFFIX)]
    names += [form.repository, form.file, *form.ends]
    return [token_id for name in names for token_id in _ids(tokenizer, name)]


def _ids(tokenizer: Tokenizer, name: str) -> list[int]:
    token_id = tokenizer.token_to_id(name) if name else None
    return [] if token_id is None else [token_id]
