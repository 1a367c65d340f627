"""The client for blocking code: made from `client/aio` by `tools/unasync.py`, except `io.py`."""

from __future__ import annotations
