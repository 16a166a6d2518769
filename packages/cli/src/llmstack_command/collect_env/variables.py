"""The environment variables that change how things run, without what nobody else should read."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PREFIXES = (
    "LLMSTACK_", "VLLM_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_",
    "TORCH", "PYTORCH_", "TRITON_", "OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "MALLOC_",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHON", "OTEL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|HEADERS", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(set, not shown)"


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Name to value, sorted; secrets are named, their values are not."""
    names = sorted(name for name in variables if name.upper().startswith(_PREFIXES))
    return {name: _shown(name, variables[name]) for name in names}


def _shown(name: str, value: str) -> str:
    if _SECRET_NAME.search(name) and value:
        return HIDDEN
    return _CREDENTIALS.sub("***@", value)
