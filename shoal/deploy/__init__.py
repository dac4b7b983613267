"""Deployment targets: packages for SageMaker, Triton and RunPod, and the code that runs inside them.

Platforms that send HTTP to a container run `shoal serve`. For the others, `worker` serves the same bodies, limits and
errors as `/invocations` behind the platform's own protocol.
"""
