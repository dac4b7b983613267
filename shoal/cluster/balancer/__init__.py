"""Load balancer in front of several `shoal serve` processes, without Ray: an asyncio HTTP and WebSocket proxy."""
