"""Reading streams, batch and streaming: what a query asks the server, and how its answers become rows.

Reading order: `columns` and `offsets` (the contracts with Spark and the checkpoint), `selection` (which streams), `tasks` (pure:
ranges to tasks), `batch_reader` (a task, and the batch read); `stream_reader` with `tail_follower`, `batch_limits`, `resume` and
`data_loss` (a streaming query); `pushed_filters` (conditions that choose what is read).
"""
