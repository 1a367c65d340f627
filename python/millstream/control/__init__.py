"""The control plane: everything the server answers in Python (`/-/...` and `/v1/stream/__ds/...`)."""
