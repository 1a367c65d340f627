"""Subscriptions: durable cursors that wake workers by webhook or by pull.

The walk of a wake: `feed` (engine says which streams changed) -> `manager` -> `machine` (pure decision)
-> `journal` (synced event) -> `delivery` or the wake stream -> a worker -> `routes` -> `machine` again.
"""
