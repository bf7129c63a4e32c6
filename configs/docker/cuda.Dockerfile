# splitscribe on NVIDIA GPUs. Build where the wheel is:
#
#   make image IMAGE=cuda
#   docker run --rm --gpus all --shm-size=4g --stop-timeout=95 -p 8000:8000 -v models:/home/ray/.cache/huggingface \
#       splitscribe:cuda splitscribe serve openai/whisper-large-v3 --host 0.0.0.0
#
# The volume keeps what was downloaded. docker/compose-cuda is the same as a file. The host brings
# the driver (580 or newer, with NVIDIA's container toolkit), torch's wheel the CUDA libraries, the
# image the compiler that flashinfer needs for kernels that it has not built yet. For RDMA also:
# --network host --ulimit memlock=-1 --device /dev/infiniband
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv wget procps ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 ray \
    && install --directory --owner=ray /home/ray/.cache /home/ray/.cache/huggingface \
    && python3 -m venv /opt/splitscribe

ENV PATH=/opt/splitscribe/bin:$PATH
COPY dist/splitscribe-*.whl dist/constraints.txt /tmp/wheel/
RUN pip install --no-cache-dir -c /tmp/wheel/constraints.txt \
        "$(ls /tmp/wheel/splitscribe-*.whl)[bulk,gpu,otel]" \
    && rm -rf /tmp/wheel

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
