"""Load tests of a server as its clients see it: latency, throughput and playback stalls."""
