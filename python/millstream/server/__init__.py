"""The server process: engine, control application and signals put together, and taken apart in order."""
