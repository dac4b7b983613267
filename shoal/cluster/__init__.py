"""Replicas of the engine on Ray Serve: more GPUs, more machines, and staying up.

A request meets a front first, which is the application of `shoal serve` without an engine of its own, and then a
replica, which is an engine and nothing else. Between them a routing strategy chooses.
"""
