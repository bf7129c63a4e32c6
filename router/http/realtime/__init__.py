"""The realtime API over HTTP and WebSocket: who may connect, how many, and each open connection."""
