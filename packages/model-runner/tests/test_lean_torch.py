"""Tests of the import of PyTorch without parts, each in a process that has not imported it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_runner.lean_torch import NAMES, PARTS
from llmstack_model_runner.testing import write_gpt2_checkpoint

LEAN = "import sys; from llmstack_model_runner import lean_torch; lean_torch.import_lean(); import torch\n"
REPORT = """
import json
print(json.dumps({"modules": sorted(name for name in sys.modules if name.startswith("torch")), "names": dir(torch)}))
"""


@cache
def found_by(code: str) -> Any:
    """What a program prints last, as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_lean_import_has_none_of_the_parts_and_computes() -> None:
    found = found_by(f"{LEAN}assert torch.equal(torch.eye(2) @ torch.eye(2), torch.eye(2))\n{REPORT}")
    assert not {*PARTS} & {*found["modules"]}
    assert not {name for module, name, _ in NAMES if module == "torch"} & {*found["names"]}


@pytest.mark.parametrize(
    "use",
    [
        "lean_torch.import_parts()",
        "import torch.export.decomp_utils; assert torch.export.__spec__.origin",
        "from torch._higher_order_ops.utils import reenter_make_fx",
        "import torch._prims",
        "assert torch.vmap(torch.sin)(torch.zeros(2)).tolist() == [0, 0]",
        "torch.utils.data.Dataset, torch.nn.quantized, torch.distributions.Normal",
        "torch.Generator().manual_seed(0)",
        "assert callable(torch.utils.checkpoint.checkpoint)",
        "assert torch.utils._python_dispatch.torchgen.model.FunctionSchema.parse('f(Tensor x) -> Tensor')",
        "assert torch.fx.experimental.proxy_tensor.make_fx",
    ],
)
def test_any_use_of_a_part_makes_it_the_import_that_it_is_elsewhere(use: str) -> None:
    whole = found_by(f"import sys, torch\n{REPORT}")
    code = """
for module, name, part in lean_torch.NAMES:
    assert getattr(sys.modules[module], name) is getattr(sys.modules[part], name)
"""
    assert found_by(f"{LEAN}{use}{code}{REPORT}") == whole


ASK_AT_ONCE = """
import importlib, random, threading
USES = [
    "lean_torch.import_parts()",
    "import torch.export.decomp_utils",
    "from torch._higher_order_ops.utils import reenter_make_fx",
    "import torch._prims",
    "importlib.import_module('torch._meta_registrations')",
    "assert torch.vmap(torch.sin)(torch.zeros(2)).tolist() == [0, 0]",
    "torch.utils.data.Dataset, torch.nn.quantized, torch.distributions.Normal",
    "torch.Generator().manual_seed(0)",
    "assert callable(torch.utils.checkpoint.checkpoint)",
    "assert torch.fx.experimental.proxy_tensor.make_fx",
    "from torch.nn.quantized import Linear",
    "import torch.ao.quantization",
    "from torchgen.model import FunctionSchema",
    "assert torch.utils._python_dispatch.torchgen.model.FunctionSchema",
]
random.Random(SEED).shuffle(USES)
sys.setswitchinterval(1e-5)
begin, errors = threading.Barrier(len(USES)), []
def ask(use):
    begin.wait()
    try:
        exec(use, {"torch": torch, "importlib": importlib, "lean_torch": lean_torch})
    except BaseException as error:
        errors.append(f"{use}: {error!r}")
threads = [threading.Thread(target=ask, args=[use], daemon=True) for use in USES]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
errors += [f"{use} waits for ever" for use, thread in zip(USES, threads) if thread.is_alive()]
import json
print(json.dumps(errors))
"""


@pytest.mark.parametrize("seed", range(2))
def test_threads_that_ask_at_once_all_find_what_they_ask_for(seed: int) -> None:
    assert found_by(f"{LEAN}SEED = {seed}\n{ASK_AT_ONCE}") == []


def test_the_compiler_works_after_a_lean_import() -> None:
    compiled = "torch.compile(lambda x: x * 2 + 1, backend='aot_eager')(torch.ones(2))"
    assert found_by(f"{LEAN}print({compiled}.tolist())") == [3, 3]


def test_logits_processors_of_others_find_every_part(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "import torch\n"
        "shape = torch.nn.Conv1d(3, 4, 3, device='meta')(torch.zeros(1, 3, 9, device='meta')).shape\n"
        "class Rule:\n"
        "    is_argmax_invariant = update_state = apply = print\n"
    )
    code = f"""
import json
sys.path.insert(0, {str(tmp_path)!r})
from llmstack_model_runner.sampling import load_logits_processors
load_logits_processors(["rules:Rule"])
print(json.dumps(list(sys.modules["rules"].shape)))
"""
    assert found_by(LEAN + code) == [1, 4, 7]


def test_names_that_do_not_exist_are_attribute_errors_as_ever() -> None:
    code = "print(json.dumps([hasattr(torch, 'nothing'), hasattr(torch.utils, 'nothing')]))"
    assert found_by(f"import json\n{LEAN}{code}") == [False, False]


def test_an_unknown_version_is_imported_whole() -> None:
    code = "import sys; from llmstack_model_runner import lean_torch; lean_torch.KNOWN_VERSIONS = ('0.',)\n"
    found = found_by(f"{code}lean_torch.import_lean()\nimport torch{REPORT}")
    assert {*PARTS} <= {*found["modules"]}


def test_a_native_model_starts_and_answers_without_the_parts(tmp_path: Path) -> None:
    write_gpt2_checkpoint(tmp_path)
    code = f"""
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import ModelRunnerConfig
runner = ModelRunner(ModelRunnerConfig({str(tmp_path)!r}, device="cpu", max_model_len=64))
runner.load_model()
runner.initialize_kv_cache(8)
"""
    assert not {*PARTS} & {*found_by(f"{LEAN}{code}{REPORT}")["modules"]}
