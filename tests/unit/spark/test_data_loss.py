"""Whether a stream that is gone was read to its end: the decision alone."""

from __future__ import annotations

import logging

import pytest

from millstream.client.pipeline_read import StreamEnd
from millstream.errors import DataLoss
from millstream.spark.read.data_loss import Losses
from millstream.spark.read.offsets import entry

FIRST, LATER, LATEST = 1000, 2000, 3000


def at(epoch: int, position: int) -> str:
    return f"{epoch:016}_{position:016}"


def end(number: int, *, tail_epoch: int = FIRST, epoch: int = FIRST) -> StreamEnd:
    return StreamEnd("s", "1000", at(tail_epoch, number * 10), number, epoch, 5)


def judged(
    number: int,
    found: StreamEnd | None,
    *,
    epoch: int = FIRST,
    seen: int | None = None,
    fail: bool = True,
) -> str | None:
    """The text of the loss; None if there is none."""
    try:
        Losses(fail).gone("s", entry(at(epoch, number * 10), "1000", number), found, seen)
    except DataLoss as loss:
        return str(loss)
    return None


def test_read_to_its_end() -> None:
    assert judged(7, end(7)) is None
    assert judged(0, end(0)) is None
    assert judged(7, end(7), seen=3) is None, "the server knows better than an old look"


def test_unread_records_are_named_exactly() -> None:
    assert "records 7 to 9 cannot be read" in str(judged(7, end(10)))
    assert "records 0 to 0 cannot be read" in str(judged(0, end(1)))
    assert "records 7 to 9 cannot be read" in str(judged(7, end(10), seen=7))


def test_without_memory_it_is_as_the_last_look_says() -> None:
    assert judged(7, None, seen=7) is None
    assert "records 7 to 8" in str(judged(7, None, seen=9))
    assert "whatever came after record 7" in str(judged(7, None))


def test_other_records_in_the_place_of_those_that_were_read() -> None:
    replaced = end(7, tail_epoch=LATER, epoch=LATER)
    assert "cut back and ended at record 7" in str(judged(7, replaced))
    assert judged(7, replaced, epoch=LATER) is None
    assert "ended at record 5" in str(judged(7, end(5, tail_epoch=LATER)))


def test_an_epoch_without_records_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert judged(7, end(7, tail_epoch=LATEST, epoch=FIRST)) is None
    assert "may be missing" in caplog.text
    caplog.clear()
    assert judged(7, end(7, tail_epoch=LATEST, epoch=FIRST), epoch=LATEST) is None
    assert caplog.text == ""


def test_another_stream_under_the_name_is_always_loss() -> None:
    for behind, said in [
        (None, "everything from record 3 of the stream that the checkpoint knows"),
        (9, "records 3 to 8 of the stream that the checkpoint knows"),
        (3, "everything from record 3, where the stream of the checkpoint ended,"),
    ]:
        with pytest.raises(DataLoss, match=said):
            Losses(fail=True).recreated("s", 3, behind)


def test_a_loss_that_is_allowed_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "millstream.spark"):
        assert judged(7, end(10), fail=False) is None
    assert "records 7 to 9" in caplog.text
