"""Videos over HTTP and offline: the tokens of transformers, hits, counts, and refusals by name."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import video_model
from media_helpers.films import film, read_by_transformers, smooth
from model_folders import model_folder
from picture_model import QUESTION, data_url, picture
from PIL import Image
from video_model import animation, frames_of, frames_url, video_url

from llmstack_llm import LLM, SamplingParams

NUM_TOKENS = 12
FRAMES, OTHER = frames_of(0, 6), frames_of(1, 4)
SHORT, LONG = animation(FRAMES), animation(OTHER, 900)
ASKED = {
    "animation": [{"type": "video_url", "video_url": {"url": video_url(SHORT)}}],
    "frames": [{"type": "video_url", "video_url": {"url": frames_url(FRAMES)}}],
    "both": [{"video_url": video_url(LONG)}, {"type": "video", "video": video_url(SHORT)}],
    "with a picture": [
        {"type": "video_url", "video_url": {"url": video_url(LONG)}},
        {"type": "image_url", "image_url": {"url": data_url(picture(3))}},
    ],
}


folder = model_folder(video_model.save_video_model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, list[int]]:
    videos = {
        "animation": [(FRAMES, 1.5)], "frames": [(FRAMES, 0.0)], "both": [(OTHER, 3.6), (FRAMES, 1.5)],
        "with a picture": [(OTHER, 3.6)],
    }  # fmt: skip
    pictures = {"with a picture": [picture(3)]}
    return {
        name: video_model.reference_answer(folder, videos[name], NUM_TOKENS, pictures.get(name, ())) for name in ASKED
    }


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    arguments = ("--limit-mm-per-prompt", '{"video": 2}', "--max-num-batched-tokens", "48")
    with serve(str(folder), "--dtype", "float32", "--served-model-name", "m", *arguments) as one:
        yield one


def ask(server: Any, content: Any, **fields: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True, **fields.pop("extra_body", {})}
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}]
    return server.client.chat.completions.create(
        model="m",
        messages=messages,
        temperature=0,
        max_tokens=fields.pop("max_tokens", NUM_TOKENS),
        extra_body=extra,
        **fields,
    )


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "libx264"), ("webm", "libvpx")])
def test_a_film_has_the_tokens_of_transformers(server: Any, folder: Path, kind: str, codec: str) -> None:
    data = film(smooth(11), kind, codec)
    frames = [Image.fromarray(one) for one in read_by_transformers(data)[0]]
    expected = video_model.reference_answer(folder, [(frames, 2.75)], NUM_TOKENS)
    url = f"data:video/{kind};base64," + base64.b64encode(data).decode()
    found = ask(server, [{"type": "video_url", "video_url": {"url": url}}])
    assert found.choices[0].token_ids == expected


def gif(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("P", (width, height)).save(buffer, "GIF")
    return buffer.getvalue()


def tokens(answer: Any, index: int = 0) -> list[int]:
    return list(answer.choices[index].token_ids)


def test_answers_are_those_of_transformers_alone_together_and_again(server: Any, reference: Any) -> None:
    assert len({tuple(one) for one in reference.values()}) == len(reference)
    assert {name: tokens(ask(server, content)) for name, content in ASKED.items()} == reference
    encoded = server.metric("llmstack:encoder_units_total")
    found = ask(server, ASKED["both"])
    assert tokens(found) == reference["both"]
    assert found.usage.prompt_tokens_details.cached_tokens > 0
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda content: tokens(ask(server, content)), [*ASKED.values()] * 2))
    assert many == [*reference.values()] * 2
    several = ask(server, ASKED["frames"], n=3)
    assert [tokens(several, index) for index in range(3)] == [reference["frames"]] * 3
    assert server.metric("llmstack:encoder_units_total") == encoded


def test_tokens_of_videos_are_counted_and_nothing_is_encoded(server: Any) -> None:
    content = [{"type": "video_url", "video_url": {"url": video_url(animation(frames_of(7, 5)))}}]
    encoded = server.metric("llmstack:encoder_units_total")
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}]
    _, tokenized, _ = server.post("/tokenize", {"model": "m", "messages": messages})
    status, estimated, _ = server.post("/v1/estimate", {"model": "m", "messages": messages})
    assert server.metric("llmstack:encoder_units_total") == encoded
    usage = ask(server, content).usage
    assert tokenized["count"] == usage.prompt_tokens
    assert status == 503 or estimated["prompt_tokens"] == usage.prompt_tokens  # too few steps may have been measured
    details = usage.prompt_tokens_details.model_dump()
    assert (details["video_tokens"], details.get("image_tokens")) == (2 * 2 * 2, None)  # two times of 2 x 2


def test_a_request_chooses_how_many_frames_are_taken(server: Any) -> None:
    for options, num_times in (({"num_frames": 2}, 1), ({"fps": 4}, 3), ({"fps": 4, "num_frames": 4}, 2)):
        usage = ask(server, ASKED["animation"], extra_body={"mm_processor_kwargs": options}).usage
        assert usage.prompt_tokens_details.model_dump()["video_tokens"] == num_times * 2 * 2
    with pytest.raises(openai.BadRequestError, match="num_frames"):
        ask(server, ASKED["animation"], extra_body={"mm_processor_kwargs": {"num_frames": 0}})


@pytest.mark.parametrize(
    ("url", "code", "text"),
    [
        ("http://127.0.0.1/a.gif", "media_url_not_allowed", "This URL"),
        ("data:video/mp4;base64,I0VYVE0zVQphLnRzCg==", "unsupported_media_format", "This is not a video"),
        (data_url(picture(0).convert("RGB")).replace("png", "gif"), "", ""),
        (video_url(SHORT[:-300]), "invalid_image", "This video cannot be read"),
        ("data:video/jpeg;base64," + ",".join(["AAAA"] * 769), "image_too_large", "This video has more than the 768"),
        (frames_url([*FRAMES, picture(0)]), "invalid_image", "This video has frames of different sizes"),
        (video_url(gif(9000, 9000)), "image_too_large", "This video has 9000"),
    ],
    ids=["address", "playlist", "still", "truncated", "many", "sizes", "large"],
)  # fmt: skip
def test_what_is_no_video_is_refused_by_name(server: Any, url: str, code: str, text: str) -> None:
    content = [{"type": "video_url", "video_url": {"url": url}}]
    if not code:
        assert ask(server, content).usage.prompt_tokens_details.model_dump()["video_tokens"]  # one frame
        return
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, content)
    assert (caught.value.param, caught.value.code) == ("messages[0].content[0]", code)
    assert text in caught.value.message


def test_a_prompt_has_as_many_videos_as_allowed(server: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, ASKED["animation"] * 3)
    assert (caught.value.param, caught.value.code) == ("messages[0].content[2]", "too_many_images")


def test_videos_offline_are_those_over_http(folder: Path, reference: Any) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    start, end = "<|im_start|>user\n", f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    one = "<|vision_start|><|video_pad|><|vision_end|>"
    with LLM(str(folder), dtype="float32", max_num_batched_tokens=64) as llm:
        array = np.stack([np.asarray(frame) for frame in FRAMES])
        given = {"animation": SHORT, "frames": FRAMES, "array": array, "both": [LONG, SHORT], "lists": [FRAMES]}
        prompts = [
            {"prompt": start + one * (2 if name == "both" else 1) + end, "multi_modal_data": {"video": video}}
            for name, video in given.items()
        ]
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy)]
        names = ["animation", "frames", "frames", "both", "frames"]
        assert found == [reference[name] for name in names]
        messages = [{"role": "user", "content": [*ASKED["with a picture"], {"type": "text", "text": QUESTION}]}]
        (answer,) = llm.chat(messages, greedy)
        assert list(answer.outputs[0].token_ids) == reference["with a picture"]
        for wrong in (3, [3], array.astype(float), array[..., :1]):
            with pytest.raises(ValueError, match="video"):
                llm.generate({"prompt": start + one + end, "multi_modal_data": {"video": wrong}}, greedy)


@pytest.mark.full
def test_a_killed_engine_core_costs_no_token(folder: Path, serve: Callable[..., Any], reference: Any) -> None:
    arguments = (
        "--dtype",
        "float32",
        "--served-model-name",
        "m",
        "--max-num-batched-tokens",
        "16",
        "--max-queue-wait",
        "600",
    )
    with serve(str(folder), *arguments) as server, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, server, content) for content in [*ASKED.values()] * 3]
        server.wait_for(lambda: server.metric("vllm:generation_tokens_total") > 0, "the first tokens")
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert [tokens(one.result()) for one in waiting] == [*reference.values()] * 3


@pytest.mark.full
def test_drafts_change_no_token(folder: Path, serve: Callable[..., Any]) -> None:
    expected = video_model.reference_answer(folder, [(FRAMES, 1.5)], 40)
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'
    with serve(str(folder), "--dtype", "float32", "--served-model-name", "m", "--speculative-config", drafts) as server:
        for _ in range(2):
            assert tokens(ask(server, ASKED["animation"], max_tokens=40)) == expected
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.full
@pytest.mark.parametrize("ranks", [("-tp", "2")])
def test_two_ranks_give_the_same_tokens(
    ranks: tuple[str, ...], folder: Path, serve: Callable[..., Any], reference: Any
) -> None:
    with serve(str(folder), "--dtype", "float32", "--served-model-name", "m", *ranks) as server:
        assert {name: tokens(ask(server, content)) for name, content in ASKED.items()} == reference
