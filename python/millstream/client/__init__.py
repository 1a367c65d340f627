"""The client: pure Python, standard library only, so that it also runs on Spark executors.

Reading order: `wire` (the protocol), `http` and `sse` (bytes), `steps` and `follow` (what happens, without I/O),
`producer` (batching and repeating), `pipeline_read` (many streams at once); then the shells: `aio/`, written by hand,
and `sync/`, made from it by `tools/unasync.py`. What tasks and threads do differently is in `io.py` of both.
`control`, `reach` and `pipeline_write` stand beside the blocking client, for the command line and for Spark.
Public names are re-exported by `millstream` and `millstream.aio`.
"""

from __future__ import annotations
