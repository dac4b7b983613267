# Two images from one file:
#   docker build --target cpu  -t shoal:cpu .
#   docker build --target cuda -t shoal:cuda .
# EXTRAS=cluster adds Ray, for deploy/kubernetes/rayservice.yaml.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
# The wheel contains the native CPU backend, which is compiled here; without a compiler it would be left out.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY shoal shoal
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


FROM ${PYTHON_IMAGE} AS base
# KubeRay's probes call wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
# Create caches and state with their owner before they become volumes: a new volume inherits it.
RUN useradd --uid 1000 --create-home shoal \
    && install --directory --owner shoal --group shoal /var/cache/shoal /var/lib/shoal
ENV PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    XDG_CACHE_HOME=/var/cache \
    XDG_STATE_HOME=/var/lib \
    XDG_DATA_HOME=/var/lib \
    HF_HOME=/var/cache/shoal/models \
    SHOAL_HOST=0.0.0.0 \
    SHOAL_PORT=8080
COPY constraints.txt /opt/shoal/constraints.txt
VOLUME ["/var/cache/shoal", "/var/lib/shoal"]
EXPOSE 8080
# Liveness, not readiness: a server must not be killed while it loads a large model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['SHOAL_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["shoal"]
CMD ["serve"]


FROM base AS cpu
ARG EXTRAS=server
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch==2.13.0
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /opt/shoal/constraints.txt "$(echo /wheels/shoal_tts-*.whl)[${EXTRAS}]"
USER 1000


FROM base AS cuda
ARG EXTRAS=server
# Triton needs a C compiler for its kernels. CUDA comes with torch, the driver with the host.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /opt/shoal/constraints.txt "$(echo /wheels/shoal_tts-*.whl)[${EXTRAS},hopper]"
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
