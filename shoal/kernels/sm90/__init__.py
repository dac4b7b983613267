"""Kernels in CUDA C++ for Hopper GPUs (compute capability 9.0), compiled at run time by NVRTC."""
