"""Deployment targets: packages for SageMaker, Triton and RunPod, and the code that runs inside them.

On platforms that send HTTP, the container runs `shoal serve`. For the others, `worker` handles the bodies of
`/invocations`, with the same limits and errors, behind the platform's own protocol.
"""
