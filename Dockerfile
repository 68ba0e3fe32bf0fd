# Trains on NVIDIA GPUs: docker build -t stoker . && docker run --gpus all --shm-size 2g stoker train demo
#
# The base is Python's own slim image, not nvidia/cuda: torch's wheels bring CUDA, cuDNN and NCCL, and the host brings
# the driver, so that a CUDA base would only add a second CUDA. What nvidia/cuda's base sets for the driver is set below.
FROM python:3.12.12-slim-bookworm AS base

# The packages that stoker needs, in the versions and with the hashes of requirements.lock.
FROM base AS packages
ENV UV_NO_CACHE=1 UV_PYTHON=/opt/stoker/bin/python
RUN python -m venv /opt/uv \
 && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9 \
 && python -m venv --without-pip /opt/stoker
WORKDIR /source
COPY requirements.lock ./
COPY packages/stoker-watch/pyproject.toml packages/stoker-watch/
COPY packages/stoker/pyproject.toml packages/stoker/
RUN /opt/uv/bin/uv pip compile --quiet --generate-hashes --constraint requirements.lock --no-emit-package stoker-watch \
      --output-file packages.txt packages/stoker-watch/pyproject.toml packages/stoker/pyproject.toml \
 && /opt/uv/bin/uv pip install --compile-bytecode --require-hashes --requirement packages.txt

# stoker alone: a change of its source changes no layer of the packages.
FROM packages AS stoker
COPY packages packages
RUN /opt/uv/bin/uv pip install --compile-bytecode --no-deps --prefix /app --build-constraint requirements.lock \
      packages/stoker-watch packages/stoker

FROM base
# gcc is for torch.compile: Triton compiles its launchers. tini passes SIGTERM on from the first moment, and reaps.
# Debian keeps only the newest version of a package: a pinned one could not be installed for long.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev tini \
 && rm -rf /var/lib/apt/lists/*
# Group 0, for clusters that choose the user id themselves.
RUN useradd --uid 1000 --gid 0 --create-home stoker && chmod g=u /home/stoker && install -d -o 1000 -g 0 -m 775 /work
COPY --from=packages /opt/stoker /opt/stoker
COPY --from=stoker /app /opt/stoker
# Where GKE, Vertex AI and Batch mount the driver; elsewhere NVIDIA's container runtime puts it into the system's folders.
# NVIDIA_VISIBLE_DEVICES is left to the one who starts the container: `all` would show a pod the GPUs of others.
ENV PATH=/opt/stoker/bin:/usr/local/nvidia/bin:$PATH \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    HOME=/home/stoker
USER 1000:0
WORKDIR /work
# A process can be started and finds its packages. Training that hangs needs no check: it ends itself with exit code 7.
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s --retries=3 CMD ["stoker", "--version"]
ENTRYPOINT ["tini", "--", "stoker"]
CMD ["--help"]
