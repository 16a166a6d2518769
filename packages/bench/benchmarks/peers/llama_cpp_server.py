"""Serves a GGUF file through llama.cpp's own server, for comparisons, where nothing is compiled.

The library is that of the wheel `xllamacpp`: its `llama-server`, built for AVX2.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the model")
    parser.add_argument("--name", help="of the model (default: that of the file)")
    parser.add_argument("--port", type=int, default=8103)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=32, help="requests at once")
    parser.add_argument("--ctx-size", type=int, default=32768, help="tokens of all requests together")
    options = parser.parse_args()

    values = xllamacpp.CommonParams()
    values.model.path = str(options.file)
    values.model_alias = {options.name or options.file.stem}
    values.hostnames, values.port = ["127.0.0.1"], options.port
    values.cpuparams.n_threads = options.threads
    values.n_parallel, values.n_ctx = options.parallel, options.ctx_size
    values.n_batch, values.n_ubatch = 2048, 512
    server = xllamacpp.Server(values)  # listens in threads of its own until it is dropped
    print(f"{server.listening_address}: {xllamacpp.get_system_info()}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
