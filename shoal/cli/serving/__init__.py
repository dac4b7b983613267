"""Commands that serve: the HTTP server and its keys, clusters, the load balancer, hosted endpoints."""
