"""Coverage-guided fuzzing of every parser of bytes that come from outside.

    python benchmarks/fuzz_parsers.py TARGET -runs=200000     # atheris, with libFuzzer's options
    python benchmarks/fuzz_parsers.py TARGET --random 10000    # without atheris

Targets: json, frames (every declared set of messages), safetensors, gguf, step_log, model_json, tool_parsers,
tool_outputs (calls in every format, cut anywhere), pictures, fetches (of media). A parser may refuse
bytes by its own error; anything else that it raises is a finding. `make fuzz` runs every target.
"""

from __future__ import annotations

import collections
import gc
import importlib
import json
import random
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import fuzz_media

from llmstack_engine_core import SchedulerConfig
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.message_set import MessageSet
from llmstack_gguf import GGUFError, read_header
from llmstack_model_files import ModelFilesError
from llmstack_model_files.folder import parse_json_object
from llmstack_model_files.safetensors_header import check_safetensors
from llmstack_output_parsers import REASONING_PARSERS, TOOL_PARSERS, ChainedParser, ToolParser
from llmstack_output_parsers.example_calls import EXAMPLE_CALLS
from llmstack_output_parsers.example_calls import TOOLS as EXAMPLE_TOOLS
from llmstack_output_parsers.testing import check_calls, check_output_parser
from llmstack_server.web.errors import HTTPError
from llmstack_server.web.json_body import decode_object
from llmstack_step_log import LogHeader, RingSink, StepLog, StepLogError, read_step_log
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import EngineCoreRequest, SamplingParams

Target = Callable[[bytes], None]
DECLARING = (
    "llmstack_engine_core.messages.protocol", "llmstack_engine_client.hosts.messages", "llmstack_parallel.messages",
    "llmstack_insight.shadow.wire", "llmstack_engine_core.kv_transfer.messages",
)  # fmt: skip
for _module in DECLARING:
    importlib.import_module(_module)

# Whose branches atheris looks for. The standard library has four times the functions, and instrumenting those takes
# longer than 200,000 inputs.
INSTRUMENTED = ("llmstack_", "PIL.")
TOOLS = {"now": {}, "look": {"type": "object", "properties": {"at": {"type": "string"}}}}


def parse_json(data: bytes) -> None:
    """Decodes the body of a request."""
    try:
        decode_object(data)
    except HTTPError:
        return


def parse_frame(data: bytes) -> None:
    """Decodes a message of one of the declared sets, which the first byte chooses."""
    sets = list(MessageSet.declared.values())
    try:
        sets[data[0] % len(sets) if data else 0].decode(data[1:])
    except CodecError:
        return


def parse_safetensors(data: bytes) -> None:
    """Checks the header of a file of weights."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        try:
            check_safetensors(Path(file.name))
        except ModelFilesError:
            return


def parse_gguf(data: bytes) -> None:
    """Reads the header of a GGUF file."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        try:
            read_header(Path(file.name))
        except GGUFError:
            return


def parse_step_log(data: bytes) -> None:
    """Reads a log of steps, then all its events, up to the damage too."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        for up_to_damage in (False, True):
            try:
                collections.deque(read_step_log(file.name, up_to_damage=up_to_damage).events(), maxlen=0)
            except StepLogError:
                continue


def parse_model_json(data: bytes) -> None:
    """Decodes a JSON file of a model."""
    try:
        parse_json_object(data, "config.json")
    except ModelFilesError:
        return


def parse_model_text(data: bytes) -> None:
    """Reads the text of a model by every tool and reasoning parser, however it is cut."""
    text = data[1:].decode(errors="replace")
    places = [byte % max(len(text), 1) for byte in data[:8]]
    makers = [*TOOL_PARSERS.values()]
    if data and data[0] % 3 == 0:
        reasoning = [*REASONING_PARSERS.values()]
        check_output_parser(lambda: reasoning[data[0] % len(reasoning)](is_open=None), text, places)
    elif data:
        check_output_parser(lambda: makers[data[0] % len(makers)](TOOLS), text, places)


# Parts of values: words, closing tags of all formats, and characters that have to be escaped.
VALUE_PARTS = (
    "Rome", " b ", "\n", '"', "\\", "é", "</parameter>", "</function>", "</tool_call>", "</arg_value>", "</invoke>",
    "}}", "<|call|>", '<|"|>', "<escape>", "]", "')", "<|tool_call_end|>", "[/TOOL_CALLS]", "```", "<", "</", "3",
)  # fmt: skip


def parse_cut_call(data: bytes) -> None:
    """Reads calls that a model has written, cut at any place: streamed as whole, decodable, and without tokens."""
    if len(data) < 4:
        return
    form = sorted(TOOL_PARSERS)[data[0] % len(TOOL_PARSERS)]
    parts = [VALUE_PARTS[byte % len(VALUE_PARTS)] for byte in data[4:12]]
    call = EXAMPLE_CALLS[form](f"a{''.join(parts)}z")
    text = ("" if data[1] % 2 else "Well. ") + call + ("\n" + call if data[1] % 4 > 1 else "")
    cut_text = text[: int.from_bytes(data[2:4], "little") % (len(text) + 1)]
    places = [byte * 3 for byte in data[4:]]
    check_calls(lambda: _tool_parser(form), cut_text, places)
    reasoning = sorted(REASONING_PARSERS)[data[-1] % len(REASONING_PARSERS)]
    chained = lambda: ChainedParser(REASONING_PARSERS[reasoning](is_open=True), _tool_parser(form))  # noqa: E731
    for name, arguments in check_output_parser(chained, f"hm {cut_text}", places).calls:
        if not isinstance(json.loads(arguments), dict):
            raise ValueError(f"{name}: {arguments}")


def _tool_parser(form: str) -> ToolParser:
    parser = TOOL_PARSERS[form](EXAMPLE_TOOLS)
    if not isinstance(parser, ToolParser):
        raise TypeError(form)
    return parser


TARGETS: dict[str, Target] = {
    "json": parse_json,
    "frames": parse_frame,
    "safetensors": parse_safetensors,
    "gguf": parse_gguf,
    "step_log": parse_step_log,
    "model_json": parse_model_json,
    "tool_parsers": parse_model_text,
    "tool_outputs": parse_cut_call,
    "pictures": fuzz_media.read_picture,
    "fetches": fuzz_media.fetch,
}


def seeds(target: str) -> list[bytes]:
    """Valid inputs of a target, to begin with."""
    if target == "frames":
        pick, sets = random.Random(0), list(enumerate(MessageSet.declared.values()))
        rows = [(number, messages, row) for number, messages in sets for row in messages.rows.values()]
        return [
            bytes([number]) + messages.encode(row.draw(pick), 7) for number, messages, row in rows for _ in range(4)
        ]
    if target == "step_log":
        return [_step_log()]
    if target == "pictures":
        return fuzz_media.picture_seeds()
    if target == "fetches":
        return fuzz_media.fetch_seeds()
    if target == "safetensors":
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        return [len(header).to_bytes(8, "little") + header + bytes(4)]
    if target == "gguf":
        key, kind = b"general.architecture", b"llama"
        metadata = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(kind)) + kind  # 8: a text
        tensor = struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 8, 0, 0)  # eight numbers of float32
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + metadata + tensor
        return [header + bytes(-len(header) % 32) + bytes(32)]
    if target == "tool_parsers":
        return [
            b'\x01<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            b"\x00<think>a</think>b",
            b"\x04<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
            b"\x03[now(), look(at='x')]",
        ]
    if target == "tool_outputs":
        return [
            bytes([form, 0, place, 0, *range(form, form + 8)])
            for form in range(len(TOOL_PARSERS))
            for place in (40, 90)
        ]
    return [b'{"model": "a", "prompt": [1, 2.5, null, true, "\\u00e9"]}', b"{}"]


def _step_log() -> bytes:
    """A log of three requests, one of them aborted, over a few steps."""
    sink = RingSink(1 << 16)
    log = StepLog(LogHeader.of(SchedulerConfig(max_num_seqs=3), CacheConfig(8, 16), {}), sink)
    for name in ("a", "b", "c"):
        log.add_request(EngineCoreRequest(name, [1, 2, 3], SamplingParams(max_tokens=3, seed=1)))
    log.abort_requests(["b"])
    for number in range(4):
        log.schedule(1000 * number)
        log.update(1000 * number + 10, 0, [[number], [7]], {})
    log.reset_prefix_cache()
    log.close()
    return sink.dump()


def run_random(target: str, count: int, seed: int) -> None:
    """Runs a target over mutations of its seeds, for where atheris is not installed."""
    draw, run = random.Random(seed), TARGETS[target]
    corpus = seeds(target)
    for number in range(count):
        data = bytearray(draw.choice(corpus))
        for _ in range(draw.randrange(6)):
            place = draw.randrange(len(data) + 1)
            data[place : place + draw.randrange(4)] = draw.randbytes(draw.randrange(4))
        try:
            run(bytes(data))
        except Exception:
            print(f"{target}: input {number} of seed {seed}: {bytes(data)!r}", file=sys.stderr)
            raise


def parsing_functions() -> list[FunctionType]:
    """The functions whose branches are looked for, of all modules that are imported."""
    functions = (thing for thing in gc.get_objects() if type(thing) is FunctionType)
    return [one for one in functions if str(one.__module__).startswith(INSTRUMENTED)]


def main(arguments: list[str]) -> int:
    target = arguments[0] if arguments else ""
    if target not in TARGETS:
        print(__doc__, file=sys.stderr)
        return 2
    if "--random" in arguments:
        run_random(target, int(arguments[arguments.index("--random") + 1]), random.randrange(2**32))
        return 0
    import atheris

    for function in parsing_functions():
        atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(seeds(target)):
            (Path(folder) / str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], *arguments[1:], folder], TARGETS[target])
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
