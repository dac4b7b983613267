"""Engine replicas on Ray Serve, for several GPUs or machines and for failover.

A request arrives at a frontend, the application of `shoal serve` without an engine of its own, and is routed to a
replica, which is one engine.
"""
