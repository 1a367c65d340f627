"""What is read in the process is told like what is read over HTTP."""

from __future__ import annotations

from collections.abc import Callable

from millstream._engine import Engine


def test_a_reader_in_the_process_is_told_of_a_loss(open_engine: Callable[[], Engine]) -> None:
    engine = open_engine()
    engine.create("s", "text/plain", "fsync")
    kept = engine.append("s", b"kept,")
    engine.set_durability("s", "ephemeral")
    lost = engine.append("s", b"lost,")
    engine = open_engine()
    tail = engine.tail("s")
    body, following, up_to_date, _, gap = engine.read("s", "-1")
    assert (body, up_to_date, gap) == (b"kept,", False, None)
    assert following != tail, "the reader has not passed the loss yet"
    # Whether something stood behind the kept record is not known; of the lost one it is.
    for offset, certain in ((following, False), (kept, False), (lost, True)):
        gap = (offset, tail, "crash", certain)
        assert engine.read("s", offset) == (b"", tail, True, False, gap)
    assert engine.read("s", str(tail)) == (b"", tail, True, False, None)
