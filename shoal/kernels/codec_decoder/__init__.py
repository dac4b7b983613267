"""Kernels of the codec's streaming decoder, over frames of several streams packed along time."""
