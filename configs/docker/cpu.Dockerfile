# splitscribe on CPUs. Build where the wheel is:
#
#   make image
#   docker run --rm --shm-size=2g --stop-timeout=95 -p 8000:8000 -v models:/home/ray/.cache/huggingface \
#       splitscribe:cpu splitscribe serve turbo --host 0.0.0.0
#
# The volume keeps what was downloaded. docker/compose is the same as a file. One container serves
# by itself; on Kubernetes the same image is every node (splitscribe config show kuberay). Shared
# memory of 64 MB, Docker's default, is too small for Ray.
FROM python:3.12-slim-bookworm

# The CPU build of torch; pip takes everything else from PyPI.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# What KubeRay's probes and Ray's dashboard call.
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ray \
    && install --directory --owner=ray /home/ray/.cache /home/ray/.cache/huggingface

COPY dist/splitscribe-*.whl dist/constraints.txt /tmp/wheel/
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
        -c /tmp/wheel/constraints.txt "$(ls /tmp/wheel/splitscribe-*.whl)[bulk,otel]" \
    && rm -rf /tmp/wheel
# The kernels, for the processor that builds; on another kind a first start compiles them (20 s).
RUN su ray -c "splitscribe check --compile"

USER ray
WORKDIR /home/ray
# As `splitscribe config env` prints it; a test keeps the two equal.
ENV RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=268435456 \
    RAY_SERVE_PROXY_USE_GRPC=1 \
    RAY_SERVE_ENABLE_DIRECT_INGRESS=0 \
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=5 \
    RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1 \
    RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1 \
    RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S=5 \
    RAY_health_check_period_ms=1000 \
    RAY_health_check_timeout_ms=2000 \
    RAY_health_check_failure_threshold=6 \
    RAY_grpc_client_keepalive_timeout_ms=6000 \
    no_grpc_proxy=0.0.0.0/0,::/0 \
    RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE=1 \
    RAY_worker_niceness=0 \
    OMP_WAIT_POLICY=PASSIVE \
    THP_MEM_ALLOC_ENABLE=1 \
    RAY_DEDUP_LOGS=0 \
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 \
    RAY_USAGE_STATS_ENABLED=0 \
    TOKENIZERS_PARALLELISM=false
EXPOSE 8000
HEALTHCHECK --start-period=900s --interval=10s CMD wget -q --no-proxy -O /dev/null http://127.0.0.1:8000/readyz
CMD ["splitscribe", "serve", "--host", "0.0.0.0"]
