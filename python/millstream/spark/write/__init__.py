"""Writing streams: `writer` (what Spark calls), `options` (what was asked), `staging` and `direct` (the two ways of a task),
`repetitions` (a batch that runs again, told from other rows under its name).
"""
