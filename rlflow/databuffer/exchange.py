"""Sends one value from the layout that made it to a layout that reads it, in one `all_to_all_single`.

A message holds, column after column, the bytes of the rows that its receiver reads, in the order in which it reads
them. Rows that a rank both holds and reads are sent to itself in the same way, so that all rows of a column arrive in
one buffer. Message sizes follow from the rows' lengths, which the row space has; only for ragged and JSON columns the
sizes of rows are sent first, in an `all_to_all` of their own. A rank that made nothing receives dtypes and scalars at
the head of one message: 8 bytes of size, then JSON, padded to 16 bytes in all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.databuffer.route import Route
from rlflow.databuffer.transport import Transport, from_message, to_message
from rlflow.databuffer.wire import Data, Form, Piece, RowBytes, copied, from_bytes, to_bytes
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import Column, columns, nbytes, to_device
from rlflow.values.host_copy import on_device
from rlflow.values.not_sent import NotSent
from rlflow.values.path import RowPath

_SIZE = torch.int64.itemsize
_ALIGNED = 16  # bytes: the head fills a multiple of these, so that the columns after it can be read as any dtype


class ValueExchange:
    """The exchange of one value on this rank: the constructor starts the collective, `finish` waits and sets `result`.

    `DataBuffer.issue` constructs it, on all ranks of both layouts, which start their exchanges in the same order. The
    transfer runs while the rank does other work, until `finish`.

    Args:
        transport: The collectives of this rank.
        route: Route that says which rows go from which rank to which.
        lengths: `[N]`, the response tokens of all rows; `PerToken` columns are cut at these.
        held: `[B]`, positions of the rows that this rank holds, among the `N`.
        annotation: Type of the value.
        value: Value that this rank made; None if it made none. It must not be changed until `wait` has returned.
        only: The columns that are read in the target, the same on all ranks; None for all that are not marked
            `OnDemand`. Others become `NotSent`.
        path: The paths of all rows `[N]`; None if the value has no column of paths.

    Attributes:
        bytes_sent: Payload sent to other ranks.
        bytes_received: Payload received from other ranks; complete once finished.
        held_bytes: Bytes that the exchange holds: those of the messages, and once it is finished those of the result's
            tensors; 0 if the result is the object that was made.
        begun: Time at which the exchange was started, in seconds of `time.perf_counter`.
        finished: Whether `result` has been set by `finish`.
        result: The value in the target layout; the very object that was made if this rank reads just the rows that it
            holds. Its tensors may be views of the received message.
    """

    def __init__(
        self,
        transport: Transport,
        route: Route,
        lengths: Tensor,
        held: Tensor,
        annotation: Any,
        value: Any,
        only: Collection[str] | None = None,
        path: RowPath | None = None,
    ) -> None:
        self.begun = time.perf_counter()
        self.bytes_sent = self.bytes_received = self.held_bytes = 0
        self.finished, self.result = False, value
        self._transport, self._route, self._all_lengths, self._annotation = transport, route, lengths, annotation
        self._lengths = lengths[held]  # [B]
        self._me = route.ranks.index(transport.rank)
        self._path = path
        self._columns = columns(annotation)
        self._travelling = [column for column in self._columns if column.sent(only)]
        self._absent = {column.name for column in self._columns if not column.asked(only)}
        self._sized = [column for column in self._travelling if column.kind in (ColumnKind.RAGGED, ColumnKind.JSON)]
        self._data: dict[str, Data] = {} if value is None else {c.name: c.of(value) for c in self._columns}
        self._forms = {c.name: Form.of(c.kind, self._data[c.name]) for c in self._travelling if c.name in self._data}
        self._work: dist.Work | None = None
        if route.moves:
            self._send()

    def wait(self) -> None:
        """Wait for the collective; afterwards `value` may be changed. A second call returns immediately."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def finish(self) -> None:
        """Wait, and set `result`: from the received bytes, padded to the longest row, or the object that was made."""
        self.wait()
        arrived = self._arrived() if self._route.moves else None
        self.finished = True
        if self._route.same:
            return
        mine = self._route.sends[self._me]  # rows that this rank gets from itself
        arrived = arrived or {column.name: self._bytes_of(column, mine) for column in self._travelling}
        fields = {column.name: self._column(column, arrived) for column in self._columns}
        self.result = fields[""] if "" in fields else self._annotation(**fields)
        self.held_bytes = nbytes(self.result, self._annotation)

    def _send(self) -> None:
        """Pack the rows that each rank reads and start to send them; the sizes of ragged rows are sent before."""
        counts = [len(rows) for rows in self._route.sends]
        rows = torch.cat(self._route.sends)
        packed = [self._bytes_of(column, rows) for column in self._travelling] if len(rows) else []
        heads = [self._head(receiver) for receiver in self._route.ranks]
        of_receiver = torch.tensor([len(head) for head in heads])
        payload = torch.zeros(len(counts), dtype=torch.int64)
        receiver = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        for column in packed:
            payload.index_add_(0, receiver, column.sizes)
        send_sizes: list[int] = (of_receiver + payload).tolist()
        sizes_sent = self._send_sizes(send_sizes, packed, counts)
        self._message, owned = _message(heads, packed, counts, sum(send_sizes), self._transport.device)
        self._receive_sizes = self._await_sizes(*sizes_sent) if sizes_sent else self._sizes_known()
        self._received, self._work = self._transport.all_to_all(
            self._message, send_sizes, self._receive_sizes, self._route.ranks
        )
        self.bytes_sent = int(payload.sum() - payload[self._me])
        self.held_bytes = owned * self._message.nbytes + self._received.nbytes

    def _bytes_of(self, column: Column, rows: Tensor) -> RowBytes:
        """The bytes of a column's rows; `rows` are indices into the rows that this rank holds."""
        return to_bytes(column.kind, self._data[column.name], self._lengths, rows, self._transport.device)

    def _head(self, receiver: int) -> bytes:
        """The head of the message to a receiver that made nothing: forms of columns, and scalars. Else empty."""
        if receiver not in self._route.receive_only or self._transport.rank != self._route.metadata_source:
            return b""
        forms = {name: form.to_json() for name, form in self._forms.items()}
        scalars = [column for column in self._columns if column.kind is ColumnKind.SCALAR]
        numbers = {c.name: [Form.of(c.kind, self._data[c.name]).to_json(), self._data[c.name].item()] for c in scalars}
        said = json.dumps({"forms": forms, "numbers": numbers}).encode()
        said += b" " * (-(_SIZE + len(said)) % _ALIGNED)
        return len(said).to_bytes(_SIZE, "little") + said

    def _read_metadata(self, message: Tensor) -> int:
        """Read the head that `_head` wrote at the start of `message`; returns its size in bytes."""
        size = int.from_bytes(from_message(message[:_SIZE]), "little")
        said = json.loads(from_message(message[_SIZE : _SIZE + size]))
        self._forms = {name: Form.from_json(form) for name, form in said["forms"].items()}
        for name, (written, number) in said["numbers"].items():
            form = Form.from_json(written)
            self._data[name] = torch.tensor(number, dtype=form.dtype, device=form.device)
        return _SIZE + size

    def _send_sizes(self, send_sizes: list[int], packed: list[RowBytes], counts: list[int]) -> _SizesSent | None:
        """Start to send each receiver the size of its message and of its ragged rows; None if all sizes are known."""
        if not self._sized and not self._route.receive_only:
            return None
        totals = torch.tensor(send_sizes)[:, None]
        named = zip(self._travelling, packed, strict=False)
        sizes = [rows.sizes.split(counts) for column, rows in named if column in self._sized]
        sent = torch.cat([part for each in zip(totals, *sizes, strict=True) for part in each])
        sends = [1 + len(self._sized) * len(rows) if packed else 1 for rows in self._route.sends]
        receives = [1 + len(self._sized) * len(rows) for rows in self._route.receives]
        return *self._transport.all_to_all(
            on_device(sent, self._transport.device), sends, receives, self._route.ranks
        ), receives

    def _await_sizes(self, received: Tensor, work: dist.Work, counts: list[int]) -> list[int]:
        work.wait()
        parts = received.cpu().split(counts)
        rows = [part[1:].view(len(self._sized), -1) if self._sized else part[1:] for part in parts]
        self._sizes_received = torch.cat(rows, dim=1) if self._sized else None
        return [int(part[0]) for part in parts]

    def _sizes_known(self) -> list[int]:
        """The size of the message from each of the route's ranks, computed from the lengths of rows."""
        counts = [len(rows) for rows in self._route.receives]
        giver = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        total = torch.zeros(len(counts), dtype=torch.int64)
        for column in self._travelling:
            total.index_add_(0, giver, self._row_sizes(column))
        sizes: list[int] = total.tolist()
        return sizes

    def _row_sizes(self, column: Column) -> Tensor:
        """Bytes of each received row of a column, sender by sender."""
        if column in self._sized:
            assert self._sizes_received is not None
            return self._sizes_received[self._sized.index(column)]
        rows, width = torch.cat(self._route.receives), self._forms[column.name].width
        return self._all_lengths[rows] * width if column.kind is ColumnKind.TOKEN else torch.full_like(rows, width)

    def _arrived(self) -> dict[str, RowBytes]:
        """The received rows of each column, sender by sender, as places in the received buffer."""
        begins = torch.tensor(self._receive_sizes).cumsum(0) - torch.tensor(self._receive_sizes)  # by sender
        counts = torch.tensor([len(rows) for rows in self._route.receives])
        if self._transport.rank in self._route.receive_only:
            metadata_source = self._route.ranks.index(self._route.metadata_source)
            message = self._received[int(begins[metadata_source]) :][: self._receive_sizes[metadata_source]]
            begins[metadata_source] += self._read_metadata(message)
        giver = torch.arange(len(counts)).repeat_interleave(counts)
        arrived = {}
        for column in self._travelling if len(giver) else ():
            sizes = self._row_sizes(column)
            of_giver = torch.zeros(len(counts), dtype=torch.int64).index_add_(0, giver, sizes)
            starts = sizes.cumsum(0) - sizes + (begins - (of_giver.cumsum(0) - of_giver))[giver]
            arrived[column.name] = RowBytes(self._received, starts, sizes)
            begins += of_giver
            self.bytes_received += int(of_giver.sum() - of_giver[self._me])
        for column in self._travelling if not len(giver) else ():
            arrived[column.name] = RowBytes(self._received, giver, giver)
        del self._message, self._received
        self.held_bytes = 0
        return arrived

    def _column(self, column: Column, arrived: dict[str, RowBytes]) -> Data:
        if column.kind is ColumnKind.PATH:
            assert self._path is not None
            rows = torch.cat(self._route.receives)[self._route.order]  # positions of the rows that are read here
            return to_device(self._path.take(rows), self._transport.device)
        if column.name in self._absent:
            return NotSent(column.name)
        if column.kind is ColumnKind.SCALAR:
            return self._data.get(column.name)
        return from_bytes(column.kind, self._forms[column.name], arrived[column.name], self._route.order)


_SizesSent = tuple[Tensor, dist.Work, list[int]]


def _message(
    heads: list[bytes], packed: list[RowBytes], counts: list[int], size: int, device: torch.device
) -> tuple[Tensor, bool]:
    """The messages for all receivers in one uint8 buffer; and whether it is a copy, False for a view of a value."""
    alone = len(packed) == 1 and not any(heads)
    of_column = [column.pieces([sum(counts)] if alone else counts) for column in packed]
    pieces: list[Piece] = []
    for number, head in enumerate([b""] if alone else heads):
        if head:
            said = on_device(to_message(head), device)
            pieces.append((said, 0, len(head)))
        for column in of_column:
            pieces += column[number]
    if len(pieces) == 1:
        buffer, start, end = pieces[0]
        return buffer[start:end], False
    return copied(pieces, torch.empty(size, dtype=torch.uint8, device=device)), True
