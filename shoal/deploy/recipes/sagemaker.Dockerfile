# Endpoint image, built on the Shoal image: docker build --target cuda -t shoal:cuda .
# SageMaker starts it as `docker run IMAGE serve`, with the content of model.tar.gz in /opt/ml/model.
ARG SHOAL_IMAGE=shoal:cuda
FROM ${SHOAL_IMAGE}

LABEL com.amazonaws.sagemaker.capabilities.multi-models=true \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true

ENTRYPOINT ["python", "-m", "shoal.deploy.container"]
CMD ["serve"]
