"""Device and host memory of the engine: limits, profiling, capacity planning, statistics."""
