"""The client: pure Python, standard library only, so that it also runs on Spark executors.

Reading order: `wire` (the protocol), `http` and `sse` (bytes), `steps` and `follow` (what
happens, without I/O), `producer` (batching and repeating), then the shells `_sync` and `_async`
with their `_transport_*` and `_producer_*`. Public names are re-exported by `millstream` and
`millstream.aio`.
"""

from __future__ import annotations
