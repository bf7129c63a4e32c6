"""The realtime API over HTTP and WebSocket: its access, its limits, and each open connection."""
