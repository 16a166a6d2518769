"""Every door takes odd pictures as they show, and refuses by name what is none: the same as the chat does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any

import picture_model
import pytest
from media_helpers.pictures import as_file
from model_folders import model_folder
from odd_pictures import COLOUR, OddPicture, odd_pictures, url_of

from llmstack_llm.offline.llm import LLM
from llmstack_types import InvalidRequestError, SamplingParams

NUM_TOKENS = 4
QUESTION = "what?"
ODD = odd_pictures()
FEW = ("jpeg-rotated-6", "truncated-png", "svg")
KEYS = ("one", "two")
Answer = tuple[int, str] | str
"""Tokens of the prompt and the text, or the code of a refusal."""


folder = model_folder(picture_model.save_picture_model)


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    state = tmp_path_factory.mktemp("state") / "files"
    options = ("--dtype", "float32", "--served-model-name", "m", "--state-dir", str(state), "--api-key", *KEYS)
    with serve(str(folder), *options) as one:
        yield one


def post(server: Any, path: str, body: Any, key: str = KEYS[0], **headers: str) -> tuple[int, Any]:
    status, answer, _ = server.post(path, body, {"authorization": f"Bearer {key}", **headers})
    assert status < 500, (status, answer)
    return status, answer


def chat_body(part: Mapping[str, Any]) -> dict[str, Any]:
    content = [part, {"type": "text", "text": QUESTION}]
    return {
        "model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }  # fmt: skip


def of_chat(status: int, answer: Any) -> Answer:
    if status != 200:
        assert answer["error"]["param"] == "messages[0].content[0]"
        return answer["error"]["code"]  # type: ignore[no-any-return]
    return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]


def chat(server: Any, url: str) -> Answer:
    return of_chat(*post(server, "/v1/chat/completions", chat_body({"type": "image_url", "image_url": {"url": url}})))


def responses(server: Any, part: Mapping[str, Any], key: str = KEYS[0]) -> Answer:
    content = [{"type": "input_image", **part}, {"type": "input_text", "text": QUESTION}]
    body = {
        "model": "m", "input": [{"role": "user", "content": content}], "temperature": 0,
        "max_output_tokens": NUM_TOKENS, "ignore_eos": True,
    }  # fmt: skip
    status, answer = post(server, "/v1/responses", body, key)
    if status != 200:
        assert answer["error"]["param"] == "input[0].content[0]"
        return answer["error"]["code"]  # type: ignore[no-any-return]
    return answer["usage"]["input_tokens"], "".join(
        part["text"] for item in answer["output"] for part in item["content"]
    )


def source_of(url: str) -> dict[str, str]:
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"type": "base64", "media_type": kind, "data": data}


def messages(server: Any, content: Any, *before: Any, key: str = KEYS[0]) -> Answer:
    body = {
        "model": "m", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "messages": [*before, {"role": "user", "content": content}],
    }  # fmt: skip
    status, answer = post(server, "/v1/messages", body, key)
    if status != 200:
        return code_of(answer["error"]["message"])
    usage = answer["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], "".join(
        block["text"] for block in answer["content"]
    )


def code_of(message: str) -> str:
    """The code of a refusal of which an API shows the sentence alone."""
    sentences = {
        "not an image of an allowed format": "unsupported_media_format", "pixels; at most": "image_too_large",
        "too many pixels": "image_too_large",
        "There is no file": "not_found", "This image": "invalid_image",
    }  # fmt: skip
    return next(code for text, code in sentences.items() if text in message)


def message(server: Any, url: str) -> Answer:
    return messages(server, [{"type": "image", "source": source_of(url)}, {"type": "text", "text": QUESTION}])


def tool_result(server: Any, url: str) -> Answer:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    image = {"type": "image", "source": source_of(url)}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image, {"type": "text", "text": QUESTION}]}
    return messages(server, [result], {"role": "user", "content": "look"}, {"role": "assistant", "content": [call]})


def lines_of(names: Mapping[str, OddPicture]) -> str:
    bodies = {name: chat_body({"type": "image_url", "image_url": {"url": one.url}}) for name, one in names.items()}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in bodies.items()
    ]
    return "\n".join(map(json.dumps, lines))


def upload(server: Any, data: bytes, purpose: str, key: str = KEYS[0]) -> Any:
    head = f'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--edge\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = head.encode() + data + b"\r\n--edge--\r\n"
    return post(server, "/v1/files", body, key, **{"Content-Type": "multipart/form-data; boundary=edge"})[1]


def fetched(server: Any, path: str) -> Any:
    request = urllib.request.Request(server.url + path, headers={"authorization": f"Bearer {KEYS[0]}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


def batch(server: Any, names: Mapping[str, OddPicture]) -> dict[str, Answer]:
    file = upload(server, lines_of(names).encode(), "batch")
    fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    begun = post(server, "/v1/batches", fields)[1]

    def ended() -> Any:
        time.sleep(0.05)
        found = json.loads(fetched(server, f"/v1/batches/{begun['id']}"))
        return found if found["status"] in ("completed", "failed", "expired") else None

    done = server.wait_for(ended, "batch")
    files = [done[name] for name in ("output_file_id", "error_file_id") if done[name]]
    return answers_of("\n".join(fetched(server, f"/v1/files/{name}/content") for name in files))


def answers_of(text: str) -> dict[str, Answer]:
    lines = [json.loads(line) for line in text.splitlines() if line]
    return {line["custom_id"]: of_chat(line["response"]["status_code"], line["response"]["body"]) for line in lines}


def run_batch(names: Mapping[str, OddPicture], tmp_path: Path, *options: str) -> dict[str, Answer]:
    (tmp_path / "in.jsonl").write_text(lines_of(names))
    command = [sys.executable, "-m", "llmstack_command", "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return answers_of((tmp_path / "out.jsonl").read_text())


def num_hits(server: Any) -> float:
    (line,) = re.findall(r"^llmstack:media_lookup_hits_total{.*} (.*)$", fetched(server, "/metrics"), re.MULTILINE)
    return float(line)


@pytest.fixture(scope="module")
def expected(server: Any) -> dict[str, Answer]:
    """What a chat says of the pictures that the files show."""
    return {
        name: one.shows if isinstance(one.shows, str) else chat(server, url_of(as_file(one.shows.convert("RGB"))))
        for name, one in ODD.items()
    }


def some(expected: Mapping[str, Answer], names: Any) -> dict[str, Answer]:
    return {name: expected[name] for name in names}


def test_the_chat_shows_every_file_right_or_refuses_it_by_name(server: Any, expected: dict[str, Answer]) -> None:
    assert {name: chat(server, one.url) for name, one in ODD.items()} == expected
    assert len({answer for answer in expected.values() if not isinstance(answer, str)}) > 8


NAMES = [pytest.param(FEW, id="few"), pytest.param(tuple(ODD), id="all", marks=pytest.mark.full)]


@pytest.mark.parametrize("names", NAMES)
def test_other_doors_say_the_same(server: Any, expected: dict[str, Answer], names: tuple[str, ...]) -> None:
    found: dict[str, dict[str, Answer]] = {"responses": {}, "messages": {}, "tool": {}}
    for name in names:
        url = ODD[name].url
        found["responses"][name] = responses(server, {"image_url": url})
        found["messages"][name] = message(server, url)
        found["tool"][name] = tool_result(server, url)
    assert found["responses"] == found["messages"] == some(expected, names)
    shown = {name: tool_result(server, url_of(as_file(ODD[name].shows.convert("RGB"))))  # type: ignore[union-attr]
             for name in names if not isinstance(expected[name], str)}  # fmt: skip
    assert found["tool"] == some(expected, names) | shown


@pytest.mark.parametrize("names", NAMES)
def test_batches_say_the_same(server: Any, expected: dict[str, Answer], names: tuple[str, ...], tmp_path: Path) -> None:
    files = {name: ODD[name] for name in names}
    assert batch(server, files) == some(expected, names)
    assert run_batch(files, tmp_path, "--url", server.url, "--api-key", KEYS[1]) == some(expected, names)


@pytest.mark.parametrize("names", NAMES)
def test_a_program_says_the_same(folder: Path, expected: dict[str, Answer], names: tuple[str, ...]) -> None:
    sampling, found = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), {}
    with LLM(str(folder), dtype="float32") as llm:
        for name in names:
            body = chat_body({"type": "image_url", "image_url": {"url": ODD[name].url}})
            try:
                (output,) = llm.chat(body["messages"], sampling, use_tqdm=False)
                found[name] = len(output.prompt_token_ids or ()), output.outputs[0].text
            except InvalidRequestError as error:
                found[name] = error.code
    assert found == some(expected, names)


@pytest.mark.full
def test_a_batch_with_a_model_of_its_own_says_the_same(
    folder: Path, expected: dict[str, Answer], tmp_path: Path
) -> None:
    options = ("--model", str(folder), "--dtype", "float32", "--served-model-name", "m")
    assert run_batch(ODD, tmp_path, *options) == expected


def embedded(server: Any, url: str, **fields: Any) -> list[float] | str:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    status, answer = post(server, "/v1/embeddings", {"model": "m", "messages": messages, **fields})
    if status != 200:
        assert answer["error"]["param"] in ("messages[0].content[0]", "truncate_prompt_tokens")
        return answer["error"]["code"]  # type: ignore[no-any-return]
    return answer["data"][0]["embedding"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", NAMES)
def test_vectors_are_those_of_what_the_files_show(server: Any, names: tuple[str, ...]) -> None:
    for name in names:
        shows = ODD[name].shows
        found = embedded(server, ODD[name].url)
        if isinstance(shows, str):
            assert found == shows, name
        else:
            assert found == embedded(server, url_of(as_file(shows.convert("RGB")))), name
    assert embedded(server, ODD["cmyk"].url, truncate_prompt_tokens=3) == "unsupported_value"


def scored(server: Any, path: str, urls: Sequence[str], text: str, **fields: Any) -> Any:
    """Scores of pictures for a text, or the code of a refusal."""
    documents = [{"content": [{"type": "image_url", "image_url": {"url": url}}]} for url in urls]
    names = ("query", "documents") if "rerank" in path else ("text_1", "text_2")
    status, answer = post(server, path, {"model": "m", **dict(zip(names, (text, documents), strict=True)), **fields})
    if status != 200:
        assert answer["error"]["param"].startswith(f"{names[1]}[") or fields
        return answer["error"]["code"]
    if "rerank" not in path:
        return [one["score"] for one in answer["data"]]
    assert [one["document"]["multi_modal"] for one in answer["results"]] == [
        documents[one["index"]]["content"] for one in answer["results"]
    ]
    return {one["index"]: one["relevance_score"] for one in answer["results"]}


@pytest.mark.parametrize("names", NAMES)
def test_scores_of_pictures_are_cosines_of_their_vectors(server: Any, names: tuple[str, ...]) -> None:
    shown = [name for name in names if not isinstance(ODD[name].shows, str)]
    query = post(server, "/v1/embeddings", {"model": "m", "input": "red"})[1]["data"][0]["embedding"]
    vectors = [embedded(server, ODD[name].url) for name in shown]
    expected = [sum(map(mul, query, vector)) for vector in vectors]  # type: ignore[arg-type]
    urls = [ODD[name].url for name in shown]
    for path in ("/score", "/v1/score"):
        assert scored(server, path, urls, "red") == pytest.approx(expected, abs=1e-6)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = scored(server, path, urls, "red")
        assert ranked == pytest.approx(dict(enumerate(expected)), abs=1e-6)
        assert [*ranked] == sorted(ranked, key=lambda index: -ranked[index])
    for name in names:
        if name not in shown:
            assert scored(server, "/score", [urls[0], ODD[name].url], "red") == ODD[name].shows, name
            assert scored(server, "/rerank", [ODD[name].url], "red") == ODD[name].shows, name


def test_a_picture_is_a_query_too_and_is_not_cut(server: Any) -> None:
    url = {"type": "image_url", "image_url": {"url": url_of(as_file(COLOUR))}}
    body = {"model": "m", "query": {"content": [url]}, "documents": [{"content": [url]}, "red"], "top_n": 1}
    (best,) = post(server, "/rerank", body)[1]["results"]
    assert (best["index"], best["relevance_score"]) == (0, pytest.approx(1.0, abs=1e-6))
    for fields in ({"truncate_prompt_tokens": 3}, {"max_tokens_per_doc": 3}):
        assert scored(server, "/score", [url_of(as_file(COLOUR))], "red", **fields) == "unsupported_value"


def test_an_uploaded_file_is_the_same_picture_for_its_key_alone(server: Any, expected: dict[str, Answer]) -> None:
    files = [upload(server, as_file(COLOUR), purpose)["id"] for purpose in ("vision", "user_data")]
    shown = expected["broken-exif"]
    hits = num_hits(server)
    for file_id in files:
        assert responses(server, {"file_id": file_id}) == shown
        image = {"type": "image", "source": {"type": "file", "file_id": file_id}}
        assert messages(server, [image, {"type": "text", "text": QUESTION}]) == shown
        assert messages(server, [image], key=KEYS[1]) == "not_found"
        assert responses(server, {"file_id": file_id}, key=KEYS[1]) == "not_found"
    assert num_hits(server) == hits + 4, "the bytes decide, however they come"
    assert responses(server, {"file_id": "file-unknown"}) == "not_found"
    svg = upload(server, b"<svg/>", "vision")["id"]
    assert responses(server, {"file_id": svg}) == "unsupported_media_format"


def test_an_earlier_turn_with_an_uploaded_file_is_read_again(server: Any) -> None:
    file_id = upload(server, as_file(COLOUR), "vision")["id"]
    content = [{"type": "input_image", "file_id": file_id}, {"type": "input_text", "text": QUESTION}]
    fields = {"model": "m", "max_output_tokens": 1}
    _, first = post(server, "/v1/responses", {**fields, "input": [{"role": "user", "content": content}]})
    after = {**fields, "previous_response_id": first["id"], "input": "and?"}
    _, second = post(server, "/v1/responses", after)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    delete = urllib.request.Request(
        f"{server.url}/v1/files/{file_id}", headers={"authorization": f"Bearer {KEYS[0]}"}, method="DELETE"
    )
    urllib.request.urlopen(delete, timeout=10).close()
    status, answer = post(server, "/v1/responses", after)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "not_found", "previous_response_id")


def test_a_uuid_is_a_name_of_its_own_key(server: Any, expected: dict[str, Answer]) -> None:
    def ask(key: str, **fields: Any) -> Answer:
        body = chat_body({"type": "image_url", "uuid": "photo", **fields})
        return of_chat(*post(server, "/v1/chat/completions", body, key))

    url = {"image_url": {"url": url_of(as_file(COLOUR))}}
    assert ask(KEYS[1], image_url=None) == "media_not_found"
    assert ask(KEYS[0], **url) == ask(KEYS[0], image_url=None) == expected["broken-exif"]
    assert ask(KEYS[1], image_url=None) == "media_not_found"
    assert ask(KEYS[1], **url) == expected["broken-exif"]
