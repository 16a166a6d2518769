"""Draft heads in plain PyTorch, over models of transformers: what their drafts are, and their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors.torch import load_file, save_file

NUM_TOKENS = 24
PROMPTS = [[(7 * i + 3 * n) % 97 for i in range(5 + 9 * n)] for n in range(4)]
LLAMA = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip


class Reference(torch.nn.Module):
    """A model of transformers, and a head that guesses the token after the next at each place."""

    method = "mtp"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model.eval()
        self.size = model.config.hidden_size
        self.texts: list[list[int]] = [self._answer(prompt) for prompt in PROMPTS]

    def states(self, text: list[int]) -> torch.Tensor:
        """What the head reads of the model at each place."""
        with torch.no_grad():
            return self.model.base_model(torch.tensor([text]), use_cache=False).last_hidden_state[0]

    def outputs(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The head's states, from those at all places and the tokens behind them."""
        raise NotImplementedError

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(outputs)

    def target(self, token_id: int) -> int:
        """The token of one of the head's logits."""
        return token_id

    def labels(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits of tokens, -100 where there is none."""
        return token_ids

    def write(self, folder: Path) -> str:
        """Writes the model, and the head beside it; the folder of a head with a checkpoint of its own."""
        raise NotImplementedError

    def _answer(self, prompt: list[int]) -> list[int]:
        mask, given = torch.ones(1, len(prompt), dtype=torch.long), torch.tensor([prompt])
        output = self.model.generate(given, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
        return output[0].tolist()

    def train_head(self) -> None:
        """Lets it guess the texts, so that there is something to accept."""
        parameters = [value for name, value in self.named_parameters() if not name.startswith("model.")]
        optimizer = torch.optim.Adam(parameters, lr=5e-3)
        for _ in range(40):
            optimizer.zero_grad()
            for text in self.texts:
                self.loss(torch.tensor(text), self.states(text)).backward()
            optimizer.step()

    def loss(self, text: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        logits = self.logits(self.outputs(states[:-2], text[1:-1]))
        return torch.nn.functional.cross_entropy(logits, self.labels(text[2:]))

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        """The guesses behind the known tokens, of which the model has not seen the last one."""
        states, found = self.states(known)[:-1], list(known[1:])
        while len(found) < len(known) - 1 + count:
            last = self.outputs(states, torch.tensor(found))[-1:]
            found.append(self.target(int(self.logits(last).argmax())))
            states = torch.cat([states, last])
        return found[len(known) - 1 :]


class OwnLayer(Reference):
    """A further layer of the model's own kind behind two norms and a joint, which the checkpoint has."""

    def __init__(
        self, family: str, values: dict[str, Any], changes: dict[str, Any], names: tuple[str, ...], *,
        is_hidden_first: bool = False, **named: Any,
    ) -> None:  # fmt: skip
        """`names`: Of the layer, both norms, the joint and the norm behind, unless that is the model's.

        `named`: What config.json says else.
        """
        make = getattr(transformers, f"{family}ForCausalLM")
        torch.manual_seed(1)
        super().__init__(make(make.config_class(**values)))
        self.head = make(make.config_class(**values | changes)).eval()
        self.norms = torch.nn.ModuleList(type(self._last_norm(self.model))(self.size, 1e-6) for _ in range(2))
        self.join = torch.nn.Linear(2 * self.size, self.size, bias=False)
        self.names, self.is_hidden_first, self.changes = names, is_hidden_first, named
        if len(names) == 4:
            self.head.base_model.norm = self.model.base_model.norm

    def outputs(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        parts = [self.norms[0](self.model.get_input_embeddings()(token_ids)), self.norms[1](states)]
        joined = self.join(torch.cat(parts[::-1] if self.is_hidden_first else parts, dim=-1))
        return self.head.base_model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]

    def write(self, folder: Path) -> str:
        layer, token_norm, hidden_norm, join, *norms = self.names
        self.model.save_pretrained(folder)
        self.head.save_pretrained(folder / "head")
        tensors, own = load_file(folder / "model.safetensors"), load_file(folder / "head" / "model.safetensors")
        start = ".layers." if layer.endswith("layers.") else ".layers.0."
        tensors |= {layer + name.partition(start)[2]: own[name] for name in own if start in name}
        tensors |= {f"{norm}.weight": self._last_norm(self.head).weight.detach().clone() for norm in norms}
        for name, part in ((token_norm, self.norms[0]), (hidden_norm, self.norms[1]), (join, self.join)):
            tensors[f"{name}.weight"] = part.weight.detach().clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | self.changes))
        return ""

    @staticmethod
    def _last_norm(model: torch.nn.Module) -> torch.nn.Module:
        base = model.base_model
        return base.norm_f if hasattr(base, "norm_f") else base.norm


class Separate(Reference):
    """A head with a checkpoint of its own, beside a Llama."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))
        self.values = {name: value for name, value in LLAMA.items() if name != "attn_implementation"}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the head's checkpoint."""
        raise NotImplementedError

    def write(self, folder: Path) -> str:
        self.model.save_pretrained(folder / "served")
        head = folder / "head"
        head.mkdir()
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
        (head / "config.json").write_text(json.dumps({"model_type": "llama"} | self.values | self.config))
        return str(head)


class Eagle(Separate):
    """EAGLE 1: a layer without its first norm, over states behind the last norm; it guesses by the model's head."""

    method = "eagle"
    config: ClassVar[dict[str, Any]] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}

    def __init__(self) -> None:
        super().__init__()
        self.join = torch.nn.Linear(2 * self.size, self.size)
        own = transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1})
        self.head = transformers.LlamaForCausalLM(own).model.eval()
        self.head.norm = self.head.layers[0].input_layernorm = torch.nn.Identity()

    def outputs(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        joined = self.join(torch.cat([self.model.model.embed_tokens(token_ids), states], dim=-1))
        return self.head(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"fc.{name}": value for name, value in self.join.named_parameters()}
        found |= {name: value for name, value in self.head.named_parameters() if name.startswith("layers.")}
        return found | {"embed_tokens.weight": self.model.model.embed_tokens.weight}


class Eagle3(Separate):
    """EAGLE 3: states after three layers are joined, and a smaller vocabulary is guessed."""

    method = "eagle3"
    layers = (1, 2, 3)
    prefix = "midlayer."
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 80,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }  # fmt: skip
    is_residual_normed = False

    def __init__(self) -> None:
        super().__init__()
        own = transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1})
        self.fc = torch.nn.Linear(3 * self.size, self.size, bias=False)
        self.layer = transformers.LlamaForCausalLM(own).model.layers[0].eval()
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.layer.self_attn, name).out_features
            setattr(self.layer.self_attn, name, torch.nn.Linear(2 * self.size, width, bias=False))
        make_norm = type(self.model.model.norm)
        self.hidden_norm, self.norm = make_norm(self.size), make_norm(self.size)
        self.lm_head = torch.nn.Linear(self.size, 80, bias=False)
        self.embedding = torch.nn.Embedding(97, self.size)
        self.targets = torch.randperm(97)[:80].sort().values

    def states(self, text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found = self.model.model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
        return self.fc(torch.cat([found[layer][0] for layer in self.layers], dim=-1))

    def outputs(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        normed = self.hidden_norm(states)
        seen = torch.cat([self.layer.input_layernorm(self.embedding(token_ids)), normed], dim=-1)[None]
        count = len(token_ids)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        angles = self.model.model.rotary_emb(seen, torch.arange(count)[None])
        attended = self.layer.self_attn(seen, position_embeddings=angles, attention_mask=mask)[0][0]
        total = (normed if self.is_residual_normed else states) + attended
        return total + self.layer.mlp(self.layer.post_attention_layernorm(total))

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(outputs))

    def target(self, token_id: int) -> int:
        return int(self.targets[token_id])

    def labels(self, token_ids: torch.Tensor) -> torch.Tensor:
        places = torch.full((97,), -100)
        places[self.targets] = torch.arange(80)
        return places[token_ids]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {self.prefix + name: value for name, value in self.layer.named_parameters()}
        found[f"{self.prefix}hidden_norm.weight"] = self.hidden_norm.weight
        known = torch.zeros(97, dtype=torch.bool)
        known[self.targets] = True
        return found | {
            "fc.weight": self.fc.weight, "norm.weight": self.norm.weight, "lm_head.weight": self.lm_head.weight,
            "embed_tokens.weight": self.embedding.weight, "d2t": self.targets - torch.arange(80), "t2d": known,
        }  # fmt: skip


class Speculator(Eagle3):
    """The same as the package speculators writes it."""

    prefix = "layers.0."
    config: ClassVar[dict[str, Any]] = {}
    is_residual_normed = True

    def write(self, folder: Path) -> str:
        own = {"num_hidden_layers": 1, "model_type": "llama"}
        self.values = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 80,
            "norm_before_residual": True, "transformer_layer_config": self.values | own,
            "eagle_aux_hidden_state_layer_ids": list(self.layers), "model_type": "speculators",
        }  # fmt: skip
        return super().write(folder)


class Medusa(Separate):
    """Three heads of a residual block each, which read one state."""

    method = "medusa"
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": 3,
        "num_hidden_layers": 1,
    }

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(self.size, self.size) for _ in range(3))
        self.lm_heads = torch.nn.ModuleList(torch.nn.Linear(self.size, 97, bias=False) for _ in range(3))

    def guess(self, number: int, states: torch.Tensor) -> torch.Tensor:
        return self.lm_heads[number](states + torch.nn.functional.silu(self.blocks[number](states)))

    def loss(self, text: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return sum(
            torch.nn.functional.cross_entropy(self.guess(number, states[: -2 - number]), text[2 + number :])
            for number in range(3)
        )  # type: ignore[return-value]

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        last = self.states(known)[-2]
        return [int(self.guess(number, last).argmax()) for number in range(count)]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"medusa_heads.{number}.0.linear.{name}": value for number, block in enumerate(self.blocks)
                 for name, value in block.named_parameters()}  # fmt: skip
        return found | {f"{number}.1.weight": head.weight for number, head in enumerate(self.lm_heads)}


class DFlash(Separate):
    """Layers of Qwen 3, for which the states after some layers are keys and values; a block is guessed at once."""

    method = "dflash"
    layers = (0, 1, 2)
    mask_token_id = 96
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 16,
        "block_size": 4, "dflash_config": {"target_layer_ids": list(layers), "mask_token_id": mask_token_id},
        "layer_types": ["full_attention"] * 2, "use_sliding_window": False, "num_target_layers": 4,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        sizes = LLAMA | {"num_hidden_layers": 2, "head_dim": 16}
        own = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).model.eval()
        self.blocks, self.rotary = own.layers, own.rotary_emb
        self.fc = torch.nn.Linear(3 * self.size, self.size, bias=False)
        self.hidden_norm, self.norm = (type(own.norm)(self.size, 1e-6) for _ in range(2))

    def states(self, text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found = self.model.model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[layer + 1][0] for layer in self.layers], dim=-1)

    def guess(self, text: torch.Tensor, states: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
        """Logits of `count` places behind each of `starts`, up to which the text is known."""
        seen = self.hidden_norm(self.fc(states))
        places = starts[:, None] + torch.arange(1 + count)
        tokens = torch.full(places.shape, self.mask_token_id)
        tokens[:, 0] = text[starts]
        hidden = self.model.model.embed_tokens(tokens)
        for layer in self.blocks:
            hidden = hidden + self._attend(layer.self_attn, layer.input_layernorm(hidden), seen, places)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.logits(self.norm(hidden)[:, 1:])

    def _attend(self, own: Any, hidden: torch.Tensor, seen: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        def heads(states: torch.Tensor, name: str, positions: torch.Tensor) -> torch.Tensor:
            split = getattr(own, f"{name}_proj")(states).unflatten(-1, (-1, 16))
            if name == "v":
                return split
            split = getattr(own, f"{name}_norm")(split)
            cos, sin = (part.unsqueeze(-2) for part in self.rotary(split, positions.reshape(1, -1)))
            cos, sin = (part.reshape(*positions.shape, 1, 16) for part in (cos, sin))
            first, second = split.chunk(2, dim=-1)
            return split * cos + torch.cat([-second, first], dim=-1) * sin

        before = torch.arange(len(seen))
        query = heads(hidden, "q", places)
        keys, values = (
            torch.cat([heads(seen, name, before).expand(len(places), -1, -1, -1), heads(hidden, name, places)], dim=1)
            for name in ("k", "v")
        )
        is_seen = torch.cat([before < places[:, :1], torch.ones_like(places, dtype=torch.bool)], dim=1)
        keys, values = (part.repeat_interleave(2, dim=2).transpose(1, 2) for part in (keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, is_seen[:, None, None]
        )
        return own.o_proj(attended.transpose(1, 2).flatten(2))

    def loss(self, text: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        count = 3
        starts = torch.arange(len(text) - NUM_TOKENS - 1, len(text) - count)
        logits = self.guess(text, states, starts, count)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text.unfold(0, count, 1)[starts + 1].flatten())

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        last = len(known) - 1
        logits = self.guess(torch.tensor(known), self.states(known)[:last], torch.tensor([last]), count)
        return logits[0].argmax(dim=-1).tolist()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"layers.{name}": value for name, value in self.blocks.named_parameters()}
        parts = {"fc": self.fc, "hidden_norm": self.hidden_norm, "norm": self.norm}
        return found | {f"{name}.weight": part.weight for name, part in parts.items()}
