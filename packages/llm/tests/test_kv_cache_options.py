"""Options of the KV cache that need the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.problem import OptionsError
from llmstack_llm.testing import write_model_folder


def test_a_cache_on_disk_compares_the_content_of_weights(tmp_path: Path):
    model = str(write_model_folder(tmp_path))
    _, engine = EngineArgs(model, kv_cache_dir="cache", kv_cache_disk_bytes=3 << 30).create_engine_config()
    assert (engine.kv_cache_dir, engine.kv_cache_disk_bytes) == (str(Path("cache").resolve()), 3 << 30)
    assert engine.model.digest_weight_content
    with pytest.raises(OptionsError, match="kv_cache_dir needs enable_prefix_caching"):
        EngineArgs(model, kv_cache_dir="cache", enable_prefix_caching=False)
