"""Does the checkpoint still fit the streams? Where reading really begins for each of them.

Where it sits: between the checkpoint and everything that counts from it, in `stream_reader.py`. Identity and
epoch of an entry are compared with the stream's; only where they differ, or the stream is not among those that
are read, is the server asked.

Invariants:
- I-HIS-1  An entry whose incarnation and epoch are those of the tail needs no question: within an epoch
           nothing is ever taken back.
- I-HIS-2  Each loss is told once per process, by the policy of `data_loss.py`.
- I-HIS-3  `begins` gives for (start, end) the same places as `checked` gave when that end was chosen.
- I-HIS-4  A stream that is gone is judged by where the server says that it ended; what this process saw last
           counts only if the server does not remember it.
- I-HIS-5  An entry leaves the checkpoint only with its stream. One that is not chosen now keeps its place, is
           not judged, and leaves when its stream is gone and was read to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.spark.read import offsets
from millstream.spark.read.data_loss import Loss, read_to_end
from millstream.spark.read.offsets import Entry, epoch_of
from millstream.spark.read.selection import fates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.client.pipeline_read import StreamTail
    from millstream.client.sync.reads import PipelineReads
    from millstream.spark.read.data_loss import Losses
    from millstream.spark.read.offsets import Offset
    from millstream.spark.read.selection import Fate, Selection
    from millstream.spark.read.tail_follower import TailState


class CheckpointEntries:
    """What one process has found out about the entries of a checkpoint."""

    def __init__(self, reads: PipelineReads, losses: Losses, selection: Selection) -> None:
        self._reads = reads
        self._losses = losses
        self._chosen = selection.chooser()
        self._told: set[tuple[str, str, int]] = set()
        self._found: dict[str, tuple[Entry | None, Entry]] = {}
        """Streams that do not begin where their entry says: entry (None: not in it), begin."""
        self._absent: dict[str, tuple[Entry, bool]] = {}
        """Streams that are not among those that are read: entry, and whether it leaves the checkpoint."""

    def checked(self, start: Offset, state: TailState) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """Where each stream that is read begins, and the entries of `start` that stay. Loss is told."""
        tails = state.streams
        begins: dict[str, Entry] = {}
        doubtful: dict[str, Entry] = {}
        replaced: dict[str, Entry] = {}
        absent: dict[str, Entry] = {}
        entries = start["streams"]
        for name, entry in entries.items():
            tail = tails.get(name)
            if tail is None:
                absent[name] = entry
            elif tail.incarnation != entry["id"]:
                replaced[name] = entry
                begins[name] = self._remembered(name, entry, _first(tail))
            elif epoch_of(entry["at"]) != epoch_of(tail.tail_offset):
                doubtful[name] = entry
            else:
                begins[name] = entry
        self._tell_replaced(replaced)
        leaving = self._leaving(absent, state)
        begins.update(self._behind_gaps(doubtful))
        for name, tail in tails.items():
            # An empty stream enters the checkpoint with its first record.
            if name not in entries and tail.tail_number > tail.first_number:
                begins[name] = self._remembered(name, None, _first(tail))
        stay = {
            name: begins.get(name, entry)
            for name, entry in entries.items()
            if name not in leaving
        }  # fmt: skip
        return begins, stay

    def begins(self, start: Offset, end: Offset) -> dict[str, Entry]:
        """Where each stream of a planned batch begins; streams that are gone begin at their end."""
        begins: dict[str, Entry] = {}
        doubtful: dict[str, Entry] = {}
        fresh: dict[str, Entry] = {}
        for name, to in end["streams"].items():
            entry = start["streams"].get(name)
            known = self._found.get(name)
            if entry is not None and entry["id"] == to["id"]:
                if epoch_of(entry["at"]) == epoch_of(to["at"]):
                    begins[name] = entry
                else:
                    doubtful[name] = entry
            elif known is not None and known[0] == entry and known[1]["id"] == to["id"]:
                begins[name] = known[1]
            else:
                fresh[name] = to
        begins.update(self._behind_gaps(doubtful))
        begins.update(self._first_places(fresh))
        for name, to in end["streams"].items():
            begins.setdefault(name, to)
        return begins

    # ------------------------------------------------------------------ one kind each

    def _tell_replaced(self, entries: Mapping[str, Entry]) -> None:
        """Other streams have these names now: how much of the old ones was unread?"""
        news = {name: entry for name, entry in entries.items() if self._first_time(name, entry)}
        found = fates(self._reads, {name: entry["id"] for name, entry in news.items()})
        for name, entry in news.items():
            end = found[name].end
            self._losses.recreated(name, entry["n"], None if end is None else end.tail_number)

    def _leaving(self, entries: Mapping[str, Entry], state: TailState) -> set[str]:
        """Streams that are not read: which of them are gone, so that their entries go, too?"""
        news = {
            name: entry
            for name, entry in entries.items()
            if name not in self._absent or self._absent[name][0] != entry
        }
        found = fates(self._reads, {name: entry["id"] for name, entry in news.items()})
        for name, entry in news.items():
            self._absent[name] = (entry, self._leaves(name, entry, found[name], state))
        return {name for name in entries if self._absent[name][1]}

    def _leaves(self, name: str, entry: Entry, fate: Fate, state: TailState) -> bool:
        if fate.there or fate.replaced:
            return False  # somebody has the name, so it is only not chosen
        if not self._chosen(name):
            return fate.end is not None and read_to_end(entry, fate.end)
        last = state.gone.get(name)
        seen = last is not None and last.incarnation == entry["id"]
        self._losses.gone(name, entry, fate.end, last.tail_number if last and seen else None)
        return True

    def _behind_gaps(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Entries of an older epoch than their stream's: the server knows what lies between."""
        begins: dict[str, Entry] = {}
        wanted: dict[str, list[dict[str, Any]]] = {}
        for name, entry in entries.items():
            known = self._found.get(name)
            if known is not None and known[0] == entry and known[1]["id"] == entry["id"]:
                begins[name] = known[1]
            else:
                wanted[name] = [{"offset": entry["at"]}]
        for name, stream in self._reads.look_up(wanted).items():
            entry = entries[name]
            if stream.incarnation != entry["id"]:
                continue
            found = stream.at[0]
            if found.error is not None:
                if self._first_time(name, entry):
                    self._losses.found(_beyond(name, entry, stream, found.error))
                begins[name] = self._remembered(name, entry, _tail(stream))
                continue
            if found.gap is None:
                # The offset is good: what differs is only the epoch of later records.
                begins[name] = self._remembered(name, entry, entry)
                continue
            if self._first_time(name, entry):
                if found.number < entry["n"]:
                    self._losses.found(_beyond(name, entry, stream, found.gap.reason))
                else:
                    self._losses.gap(name, found.gap)
            place = offsets.entry(found.offset, entry["id"], found.number)
            begins[name] = self._remembered(name, entry, place)
        return begins

    def _first_places(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Streams that begin with this batch. One that is gone already cannot be read."""
        begins: dict[str, Entry] = {}
        there = self._reads.look_up({name: [] for name in entries})
        for name, to in entries.items():
            stream = there.get(name)
            if stream is not None and stream.incarnation == to["id"]:
                begins[name] = self._remembered(name, None, _first(stream))
            elif self._first_time(name, to):
                self._losses.unread(name, 0, to["n"])
        return begins

    # ------------------------------------------------------------------ memory

    def _first_time(self, name: str, entry: Entry) -> bool:
        key = (name, entry["at"], entry["n"])
        if key in self._told:
            return False
        self._told.add(key)
        return True

    def _remembered(self, name: str, entry: Entry | None, begin: Entry) -> Entry:
        self._found[name] = (entry, begin)
        return begin


def _first(stream: StreamTail) -> Entry:
    return offsets.entry(stream.first_offset, stream.incarnation, stream.first_number)


def _tail(stream: StreamTail) -> Entry:
    return offsets.entry(stream.tail_offset, stream.incarnation, stream.tail_number)


def _beyond(name: str, entry: Entry, stream: StreamTail, reason: str) -> Loss:
    """The checkpoint is ahead of what the server still has."""
    return Loss(
        name,
        f"the checkpoint is at record {entry['n']} (offset {entry['at']}), but the stream "
        f"of class {stream.durability} was cut back; what took the place of its last records",
        f"the server lost them ({reason})",
    )
