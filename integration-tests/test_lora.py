"""LoRA adapters of a real server: several at once, loaded while it runs, and after a crash of the engine core."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import llmstack_demo_model
from llmstack_llm import LLM, BeamSearchParams, LoRARequest, SamplingParams
from llmstack_model_runner.testing import write_random_adapter

MODEL = Path(llmstack_demo_model.__file__).parent / "model"
TARGETS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
PROMPT = "Once upon a time"


def write(folder: Path, seed: int) -> Path:
    return write_random_adapter(folder, MODEL, TARGETS, seed, spread=0.15)


def test_prompts_and_beams_of_one_call_have_their_own_adapters(tmp_path: Path) -> None:
    requests = [None, *(LoRARequest(f"a{seed}", seed, str(write(tmp_path / f"{seed}", seed))) for seed in (1, 2))]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    # The penalty of the model's own file would be in the scores of beams.
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "num_kv_blocks": 64, "generation_config": "vllm"}
    with LLM(str(MODEL), max_model_len=64, dtype="float32", **options) as llm:
        together = llm.generate([PROMPT] * 3, params, lora_request=requests, use_tqdm=False)
        texts = [output.outputs[0].text for output in together]
        assert len(set(texts)) == 3
        for request, text in zip(requests, texts, strict=True):
            alone = llm.generate(PROMPT, params, lora_request=request, use_tqdm=False)
            assert alone[0].outputs[0].text == text
        searched = llm.beam_search([PROMPT] * 3, BeamSearchParams(3, 6, ignore_eos=True), lora_request=requests)
        prompt_length = len(llm.get_tokenizer().encode(PROMPT))
        for request, output in zip(requests, searched, strict=True):
            best = output.sequences[0]
            for other in requests:
                again = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
                scored = llm.generate({"prompt_token_ids": best.tokens}, again, lora_request=other, use_tqdm=False)[0]
                scores = list(zip(best.tokens, scored.prompt_logprobs or [], strict=True))[prompt_length:]
                total = sum(entry[token].logprob for token, entry in scores if entry is not None)
                assert (total == pytest.approx(best.cum_logprob, abs=1e-3)) == (other is request)


@pytest.mark.filterwarnings("ignore")  # those of peft and transformers
def test_vectors_are_those_of_the_adapter_in_peft(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = write(tmp_path / "a", 1)
    base = transformers.GPT2LMHeadModel.from_pretrained(MODEL, dtype=torch.float32).eval()
    requests = [None, LoRARequest("a", 1, str(folder))]
    with LLM(str(MODEL), enable_lora=True, num_kv_blocks=64, max_model_len=64, dtype="float32") as llm:
        token_ids = llm.get_tokenizer().encode(PROMPT)
        together = llm.embed([PROMPT] * 2, lora_request=requests, use_tqdm=False)
        for request, output in zip(requests, together, strict=True):
            model = base if request is None else peft.PeftModel.from_pretrained(base, folder).get_base_model()
            with torch.no_grad():
                hidden = model.transformer(torch.tensor([token_ids])).last_hidden_state[0, -1]
            found, expected = torch.tensor(output.outputs.embedding), torch.nn.functional.normalize(hidden, dim=0)
            torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5)
            alone = llm.embed(PROMPT, lora_request=request, use_tqdm=False)[0]
            assert alone.outputs.embedding == output.outputs.embedding
        scores = [llm.score("a", "b", lora_request=one, use_tqdm=False)[0].outputs.score for one in requests]
        assert scores[0] != scores[1]


@pytest.mark.full
def test_adapters_are_loaded_at_run_time_and_again_after_a_crash(serve: Callable[..., Any], tmp_path: Path) -> None:
    started, later = write(tmp_path / "started", 1), write(tmp_path / "root" / "later", 2)
    with serve(
        "--enable-lora", "--max-loras", "2", "--lora-modules", f"started={started}", "--lora-root",
        str(tmp_path / "root"), "--enable-control-routes",
    ) as server:  # fmt: skip

        def complete(model: str, chunks: list[str]) -> None:
            stream = server.client.completions.create(
                model=model, prompt=PROMPT, max_tokens=400, temperature=0.0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            chunks.extend(chunk.choices[0].text for chunk in stream)  # one by one: others watch the list

        base = str(server.client.models.list().data[0].id)
        url = str(server.client.base_url).rstrip("/")
        answer = httpx.post(f"{url}/load_lora_adapter", json={"lora_name": "later", "lora_path": "later"}, timeout=60)
        assert answer.status_code == 200, answer.text
        (later / "adapter_config.json").write_text("{}")
        refused = httpx.post(
            f"{url}/load_lora_adapter",
            json={"lora_name": "later", "lora_path": "later", "load_inplace": True},
            timeout=60,
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        assert [model.id for model in server.client.models.list().data] == [base, "started", "later"]

        def run(meanwhile: Callable[[dict[str, list[str]]], None]) -> dict[str, str]:
            model_to_chunks: dict[str, list[str]] = {name: [] for name in (base, "started")}
            threads = [threading.Thread(target=complete, args=item, daemon=True) for item in model_to_chunks.items()]
            for thread in threads:
                thread.start()
            meanwhile(model_to_chunks)
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            return {name: "".join(chunks) for name, chunks in model_to_chunks.items()}

        undisturbed = run(lambda _: None)
        assert len(set(undisturbed.values())) == 2
        pid = server.engine_pid()

        def kill(model_to_chunks: dict[str, list[str]]) -> None:
            server.wait_for(lambda: all(model_to_chunks.values()), "running streams")
            os.kill(pid, signal.SIGKILL)

        assert run(kill) == undisturbed
        assert server.engine_pid() != pid
        with pytest.raises(openai.APIError):  # its files are others now, so another engine core does not serve it
            server.client.with_options(max_retries=0).completions.create(model="later", prompt=PROMPT, max_tokens=1)


@pytest.mark.full
def test_an_adapter_is_that_of_all_api_processes_and_ends_with_its_last_request(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path / "root" / "style", 1)
    with serve(
        "--api-server-count", "2", "--enable-lora", "--lora-root", str(tmp_path / "root"), "--enable-control-routes"
    ) as server:
        url = str(server.client.base_url).rstrip("/")

        def change(what: str) -> None:
            body = {"lora_name": "style"} | ({"lora_path": "style"} if what == "load" else {})
            answer = httpx.post(f"{url}/{what}_lora_adapter", json=body, timeout=60)
            assert answer.status_code == 200, answer.text

        def seen() -> set[tuple[str, bool]]:
            """What connections of their own find, until both processes have answered."""
            found: dict[int, tuple[str, bool]] = {}
            for _ in range(1000):
                if len(found) == 2:
                    break
                with httpx.Client(timeout=60) as client:  # one connection, so one process
                    info = client.get(f"{url.removesuffix('/v1')}/server_info").json()
                    names = [model["id"] for model in client.get(f"{url}/models").json()["data"]]
                    answer = client.post(f"{url}/completions", json={"model": "style", "prompt": "a", "max_tokens": 1})
                found[info["processes"]["api_server_index"]] = ",".join(names[1:]), answer.status_code == 200
            assert len(found) == 2
            return set(found.values())

        assert seen() == {("", False)}
        for _ in range(2):
            change("load")
            assert seen() == {("style", True)}
            stream = server.client.completions.create(
                model="style", prompt=PROMPT, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            change("unload")
            assert seen() == {("", False)}
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
