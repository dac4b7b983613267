# Worker image, built on the Shoal image: docker build --target cuda -t shoal:cuda .
ARG SHOAL_IMAGE=shoal:cuda
FROM ${SHOAL_IMAGE}

USER 0
RUN pip install --no-cache-dir --constraint /opt/shoal/constraints.txt runpod==1.12.0
COPY checkpoint /opt/shoal/checkpoint
USER 1000

ENV SHOAL_MODEL=/opt/shoal/checkpoint
HEALTHCHECK NONE
ENTRYPOINT ["python", "-u", "-m", "shoal.deploy.runpod_worker"]
CMD []
