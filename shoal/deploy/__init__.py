"""Where voices are deployed to: what is packed for a platform, and what speaks inside it.

Platforms that speak HTTP to a container run `shoal serve`. The others bring a protocol of their own, and `worker` puts
the same desk behind it: bodies, limits and errors are those of `/invocations`.
"""
