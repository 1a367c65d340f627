"""What the tests share: a real server process, an HTTP client down to the bytes, an SSE reader."""
