"""The realtime API over HTTP and WebSockets."""
