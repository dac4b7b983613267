# Image of a multi-model endpoint on GPUs: SageMaker's Triton container with Shoal installed in its Python.
# Choose the account of your region and a release with Python 3.12, 24.11 or newer:
#   docker build --build-arg TRITON_IMAGE=ACCOUNT.dkr.ecr.REGION.amazonaws.com/sagemaker-tritonserver:25.09-py3 .
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE}

COPY shoal_tts-*.whl /tmp/
# The container's Python is the distribution's, which pip leaves alone unless told otherwise.
RUN pip install --no-cache-dir --break-system-packages "$(echo /tmp/shoal_tts-*.whl)[server]" && rm /tmp/shoal_tts-*.whl
