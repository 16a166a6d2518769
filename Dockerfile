# llmstack on a CPU: `docker build -t llmstack .`, then `docker run -p 127.0.0.1:8000:8000 llmstack`.
# Arguments go to `llmstack serve`; without any, the embedded demo model is served.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY packages packages
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./packages/*/

FROM python:${PYTHON}-slim
RUN useradd --create-home --uid 1000 llmstack
# The CPU build of PyTorch first: the index's own build brings gigabytes of CUDA.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
RUN --mount=from=wheels,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
USER llmstack
WORKDIR /home/llmstack
# Models from the hub; mount a volume here to keep them.
VOLUME /home/llmstack/.cache/huggingface
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# Inside a container every address is the container's own: who can reach it is decided by the published port.
ENTRYPOINT ["llmstack", "serve", "--host", "0.0.0.0", "--port", "8000"]
