"""Facts about PyTorch and the kernels, as JSON.

`collect-env` runs this module in a separate process, since the import of PyTorch is slow and may fail.
"""

from __future__ import annotations

import importlib
import json
import logging
from typing import Any


def torch_facts(torch: Any) -> dict[str, str]:
    """PyTorch's build and the devices it sees."""
    facts = {
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'no'}, HIP {torch.version.hip or 'no'})",
        "threads": f"{torch.get_num_threads()} within, {torch.get_num_interop_threads()} between operations",
        "processor code": f"{torch.backends.cpu.get_cpu_capability()}, oneDNN {_yes(torch.backends.mkldnn)}, "
        f"MKL {_yes(torch.backends.mkl)}",
        "torch sees a GPU": "yes" if torch.cuda.is_available() else "no",
    }
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        facts[f"cuda:{index}"] = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    return facts


def kernel_facts() -> dict[str, str]:
    """The backend of each operation on a CPU."""
    try:
        native = importlib.import_module("llmstack_kernels.native")
        caches = importlib.import_module("llmstack_kernels.caches").describe()
        backends = importlib.import_module("llmstack_kernels.dispatch").backends("cpu")
    except ImportError as error:
        return {"kernels": f"not installed ({error})"}
    library = native.library()
    variant = "not built: PyTorch's operations run" if library is None else library.variant
    return {"native kernels": variant, "caches": caches, **{f"  {name}": backend for name, backend in backends.items()}}


def _yes(backend: Any) -> str:
    return "yes" if backend.is_available() else "no"


def main() -> None:
    logging.disable(logging.WARNING)  # the report itself says if the native kernels are not built
    print(json.dumps({**torch_facts(importlib.import_module("torch")), **kernel_facts()}))


if __name__ == "__main__":
    main()
