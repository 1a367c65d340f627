"""How queries do: `lag` (how far one is behind), `listener` (the same for Prometheus and for a stream)."""
