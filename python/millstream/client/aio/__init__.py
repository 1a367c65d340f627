"""The client for asyncio: written by hand, and what `client/sync` is made from."""

from __future__ import annotations
