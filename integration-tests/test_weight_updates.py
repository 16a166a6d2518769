"""Weights of a running server change in place, and a model is trained through it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policies import write_policy, write_weights

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80]
NUM_ROLLOUTS, LENGTH, TARGET = 32, 12, 7
ROLLOUTS = {
    "prompt": PROMPT, "max_tokens": LENGTH, "n": NUM_ROLLOUTS, "temperature": 1, "ignore_eos": True, "logprobs": 0,
    "return_token_ids": True,
}  # fmt: skip
OPTIONS = (
    "--enable-control-routes", "--dtype", "float32", "--num-kv-blocks", "512", "--max-num-seqs", "64",
    "--enable-deterministic-inference",
)  # fmt: skip


class Served:
    """A server of the policy, and the folders that it takes weights from."""

    def __init__(self, server: Any, root: Path) -> None:
        self.server, self.root = server, root

    def post(self, path: str, body: Any) -> Any:
        status, answer, _ = self.server.post(path, body)
        assert status == 200, answer
        return answer

    def rollouts(self, seed: int) -> tuple[str, list[list[int]], list[list[float]]]:
        """The id of an answer, and the tokens of its completions with their log-probabilities."""
        answer = self.post("/v1/completions", ROLLOUTS | {"seed": seed})
        choices = sorted(answer["choices"], key=lambda one: one["index"])
        return (
            answer["id"],
            [one["token_ids"] for one in choices],
            [one["logprobs"]["token_logprobs"] for one in choices],
        )

    def logprobs_of(self, completions: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of given completions by the weights of now, each read as a prompt."""
        found = []
        for token_ids in completions:
            answer = self.post("/v1/completions", {"prompt": PROMPT + token_ids, "max_tokens": 1, "prompt_logprobs": 0})
            places = answer["choices"][0]["prompt_logprobs"][len(PROMPT) :]
            found.append([place[str(token)]["logprob"] for place, token in zip(places, token_ids, strict=True)])
        return found


@pytest.fixture
def start(serve: Callable[..., Any], tmp_path: Path) -> Any:
    policy = write_policy(tmp_path / "policy")
    root = tmp_path / "updates"
    root.mkdir()

    def begin(*options: str) -> Any:
        arguments = ("--weight-update-dir", str(root), *OPTIONS, *options)
        return serve(str(tmp_path / "policy"), *arguments)

    return begin, policy, root


def recomputed(answer_id: str, log: Path, model: Path, weights: Path | None) -> list[list[float]]:
    """What `llmstack logprobs` says of a past answer."""
    given = () if weights is None else ("--weights", weights)
    command = [sys.executable, "-m", "llmstack_command", "logprobs", answer_id, "--log", log, "--model", model,
               "--dtype", "float32", *given]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [[one["logprob"] for one in json.loads(line)["tokens"]] for line in done.stdout.splitlines()]


def policy_gradient(policy: Any, optimizer: Any, completions: list[list[int]]) -> float:
    """A step of REINFORCE with a baseline; the mean reward, which is the share of one token."""
    tokens = torch.tensor([PROMPT + one for one in completions])
    rewards = (tokens[:, len(PROMPT) :] == TARGET).float().mean(dim=1)
    logits = policy(tokens).logits[:, len(PROMPT) - 1 : -1].log_softmax(dim=-1)
    chosen = logits.gather(-1, tokens[:, len(PROMPT) :, None]).squeeze(-1).sum(dim=1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    optimizer.zero_grad()
    (-(advantages * chosen).mean()).backward()
    optimizer.step()
    return float(rewards.mean())


@pytest.mark.timeout(240)
def test_a_policy_is_trained_through_the_server(start: Any, tmp_path: Path) -> None:
    begin, policy, root = start
    log, rewards, kept = tmp_path / "steps.log", [], []
    with torch.no_grad():  # so that a few steps suffice
        policy.lm_head.weight[TARGET] += 0.02
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    with begin("--record-steps", str(log)) as server:
        served = Served(server, root)
        weights = write_weights(policy, root / "step-0")
        served.post("/update_weights", {"update_info": {"path": "step-0"}})
        for number in range(1, 5):
            answer_id, completions, logprobs = served.rollouts(seed=number)
            # On the policy: what the weights of now say of the rollouts has the bits that the rollouts came with.
            assert served.logprobs_of(completions[:4]) == logprobs[:4]
            kept.append((answer_id, weights, completions, logprobs))
            rewards.append(policy_gradient(policy, optimizer, completions))
            weights = write_weights(policy, root / f"step-{number}")
            answer = served.post("/update_weights", {"update_info": {"path": f"step-{number}"}})
            assert answer["weights"]["name"] == f"step-{number}"
            # Off the policy: the old rollouts have other ratios now.
            ratios = [
                math.exp(sum(new) - sum(old))
                for new, old in zip(served.logprobs_of(completions[:4]), logprobs[:4], strict=True)
            ]
            assert all(ratio != 1.0 for ratio in ratios)
        _, last, _ = served.rollouts(seed=99)
        newest = served.logprobs_of(kept[0][2][:2])
    rewards.append(sum(token == TARGET for one in last for token in one) / (NUM_ROLLOUTS * LENGTH))
    assert rewards[-1] > rewards[0] + 0.2, rewards
    # The ratio of an old rollout by the newest weights is what a recomputation says of it.
    answer_id, weights, _, logprobs = kept[0]
    old = recomputed(answer_id, log, tmp_path / "policy", weights)
    assert old == logprobs
    assert all(sum(new) != sum(past) for new, past in zip(newest, old[:2], strict=True))


GREEDY = {"prompt": PROMPT * 4, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
          "logprobs": 0}  # fmt: skip


def answer_of(served: Served) -> tuple[list[float], int, str]:
    """Log-probabilities of a fixed request, its tokens from the cache, and the fingerprint."""
    answer = served.post("/v1/completions", GREEDY)
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer["choices"][0]["logprobs"]["token_logprobs"], cached, answer["system_fingerprint"]


def other_weights(policy: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in policy.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    return write_weights(policy, folder)


@pytest.mark.timeout(240)
def test_no_answer_has_anything_of_the_weights_before(start: Any, tmp_path: Path) -> None:
    begin, policy, root = start
    served_weights = write_weights(policy, root / "first")
    other_weights(policy, root / "second", 5)
    log, cache = tmp_path / "log", tmp_path / "cache"
    with begin("--record-steps", str(log), "--kv-cache-dir", str(cache), "--block-size", "8") as server:
        served = Served(server, root)
        first, _, name = answer_of(served)
        assert answer_of(served)[1] > 0  # the prompt is cached
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": {}}), ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"path": "second"}}),
        ):  # fmt: skip
            served.post(path, body)
        assert answer_of(served) == (first, 24, name)  # nothing is used before the end of the update
        served.post("/finish_weight_update", {})
        second, num_cached, other_name = answer_of(served)
        assert (num_cached, second != first, other_name != name) == (0, True, True)
        server.wait_for(lambda: any(cache.rglob("*")), "blocks on disk")
        # Another engine core begins with the weights of now, not with those of the start.
        killed = server.engine_pid()
        os.kill(killed, signal.SIGKILL)
        server.wait_for(lambda: len(server.engine_pids()) == 1 and server.engine_pid() != killed, "another engine core")
        server.wait_for(lambda: server.get_status("/ready") == 200, "its weights")
        assert answer_of(served)[0] == second
        body = {"model_path": str(served_weights), "weight_version": "v1", "abort_all_requests": True}
        assert served.post("/update_weights_from_disk", body)["success"] is True
        again, num_cached, _ = answer_of(served)
        assert again == first
        weights = server.get_json("/v1/models")["data"][0]["weights"]
        assert weights["name"] == "v1"
        assert server.get_json("/server_info")["engine"]["backends"]["weights"] == weights["digest"]


def broken(root: Path, name: str, change: Callable[[dict[str, Any]], object]) -> str:
    tensors = load_file(root / "good" / "model.safetensors")
    change(tensors)
    (root / name).mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, root / name / "model.safetensors")
    return name


@pytest.mark.timeout(240)
def test_what_does_not_fit_leaves_the_weights_as_they_are(start: Any, tmp_path: Path) -> None:
    begin, policy, root = start
    write_weights(policy, root / "good")
    norm, head = "model.norm.weight", "lm_head.weight"
    reasons = {
        broken(root, "missing", lambda tensors: tensors.pop(norm)): "missing: model.norm.weight",
        broken(root, "shape", lambda tensors: tensors.update({head: tensors[head][1:]})): "of a wrong shape: lm_head",
        broken(root, "nan", lambda tensors: tensors[norm].fill_(math.nan)): "NaN or infinite",
        broken(root, "cut", lambda tensors: None): "model.safetensors",
        broken(root, "config", lambda tensors: None): "another 'rope_theta'",
    }
    with (root / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    (root / "config" / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    (root / "empty").mkdir()
    reasons["empty"] = "weights"
    (tmp_path / "outside").mkdir()
    with begin() as server:
        served = Served(server, root)
        before = answer_of(served)[0]
        for name, reason in reasons.items():
            status, answer, _ = server.post("/update_weights", {"update_info": {"path": name}})
            assert (status, answer["error"]["code"]) == (409, "reload_failed"), answer
            assert reason in answer["error"]["message"], answer
        for name in ("none", "../outside", str(tmp_path / "outside"), "", ".", "a\0b"):
            status, answer, _ = server.post("/update_weights", {"update_info": {"path": name}})
            assert (status, answer["error"]["param"]) == (400, "update_info.path"), answer
        status, answer, _ = server.post("/update_weights", {"update_info": {"path": "good", "names": ["a"]}})
        assert (status, answer["error"]["param"]) == (400, "names")
        assert server.post("/finish_weight_update", {})[0] == 409
        assert server.post("/init_weight_transfer_engine", {"init_info": {"master_port": 1}})[0] == 400
        assert answer_of(served)[0] == before
        served.post("/update_weights", {"update_info": {"path": "good"}})
        status, answer, _ = server.post("/update_weights", {"update_info": {"path": "good"}})
        assert status == 400
        assert "the weights of this folder are in use" in answer["error"]["message"]
        assert answer_of(served)[0] == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [("-tp", "2"), ("-pp", "2")], ids=" ".join)
def test_all_ranks_change_or_none(
    ranks: tuple[str, str], start: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    begin, policy, root = start
    write_weights(policy, root / "good")
    other_weights(policy, root / "second", 5)
    # Rows that the last rank alone reads, whether it has the last heads or, as rank 1, the first layer.
    rows = "model.layers.0.self_attn.q_proj.weight"
    broken(root, "nan", lambda tensors: tensors[rows][-1].fill_(math.nan))
    whole = shutil.copytree(tmp_path / "policy", tmp_path / "whole")
    shutil.copy(root / "second" / "model.safetensors", whole)
    with serve(str(whole), *OPTIONS, *ranks) as server:
        expected = answer_of(Served(server, root))[0]
    with begin("--block-size", "8", *ranks) as server:
        served = Served(server, root)
        first, _, name = answer_of(served)
        assert answer_of(served)[1] > 0  # the prompt is cached
        status, answer, _ = server.post("/update_weights", {"update_info": {"path": "nan"}})
        assert (status, "NaN or infinite" in answer["error"]["message"]) == (409, True), answer
        assert answer_of(served)[::2] == (first, name)
        served.post("/update_weights", {"update_info": {"path": "second"}})
        second, num_cached, other_name = answer_of(served)
        assert (second, num_cached) == (expected, 0)
        assert (second != first, other_name != name) == (True, True)
        (killed,) = server.rank_pids()
        os.kill(killed, signal.SIGKILL)
        assert answer_of(served)[0] == second  # by the ranks that take their place
        assert server.rank_pids() != [killed]
