"""The client: pure Python, standard library only, so that it also runs on Spark executors.

Reading order: `_wire` (the protocol), `_http` and `_sse` (bytes), `_steps` and `_follow` (what
happens, without I/O), `_producer` (batching and repeating), then the shells `_sync` and `_async`
with their `_transport_*` and `_producer_*`. Public names are re-exported by `millstream` and
`millstream.aio`.
"""

from __future__ import annotations
