"""One value on its way from the layout that made it to a layout that reads it, in one `all_to_all_single`.

A message holds, column after column, the bytes of the rows that its receiver lacks. How many they are follows from
the rows' lengths, but for ragged and JSON columns: these put the size of each row at the head of the message, and the
sizes of all messages are agreed first. A rank that has made nothing is told dtypes and scalars at the head as well.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from rlflow.data.batch import Column, Cut, columns
from rlflow.data.route import Route
from rlflow.data.transport import Transport, Work
from rlflow.data.wire import Data, Form, from_bytes, to_bytes

_SIZE = torch.int64.itemsize


class Exchange:
    """The exchange of one value, seen from this rank: begun when it is made, ended by `result`.

    Args:
        transport: Of this rank.
        route: Of the value's rows.
        lengths: `[N]`, where `PerToken` columns of all rows are cut.
        held: `[B]`, positions of the rows that this rank holds.
        annotation: The value's type.
        value: What this rank made; None where it made nothing.

    Attributes:
        bytes_sent: Payload for other ranks.
        bytes_received: Payload from them, complete after `result`.
        metadata_bytes: Sizes, dtypes and scalars from them, complete after `result`.
        buffer_bytes: What the messages hold in memory until `result`.
    """

    def __init__(
        self, transport: Transport, route: Route, lengths: Tensor, held: Tensor, annotation: Any, value: Any
    ) -> None:
        self.bytes_sent = self.bytes_received = self.metadata_bytes = self.buffer_bytes = 0
        self._transport, self._route, self._all_lengths, self._annotation = transport, route, lengths, annotation
        self._lengths = lengths[held]  # [B]
        self._columns = columns(annotation)
        self._travelling = [column for column in self._columns if column.cut is not Cut.SCALAR and not column.home]
        self._sized = [column for column in self._travelling if column.cut in (Cut.RAGGED, Cut.JSON)]
        self._value = value
        self._data: dict[str, Data] = {} if value is None else {c.name: _data(value, c) for c in self._columns}
        self._forms = {c.name: Form.of(c.cut, self._data[c.name]) for c in self._travelling if c.name in self._data}
        # Rows to be sent, receiver by receiver, then rows to be kept.
        self._rows = self._bytes_of(torch.cat(route.sends if route.same else (*route.sends, route.keeps)))
        self._work: Work | None = None
        if route.moves:
            self._send()

    def wait(self) -> None:
        """Return when this rank has sent and received everything."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def result(self) -> Any:
        """The value in the target layout; the very object that was made if this rank's rows are the same. Once only."""
        self.wait()
        if self._route.same:
            return self._value
        arrived = self._unpack()
        fields = {column.name: self._column(column, arrived) for column in self._columns}
        return fields[""] if "" in fields else self._annotation(**fields)

    def _send(self) -> None:
        """Pack what each rank lacks and let the messages go; sizes that rows do not tell are agreed meanwhile."""
        sizes = {name: [piece.numel() for piece in pieces] for name, pieces in self._rows.items()}
        messages: list[Tensor] = []
        send_sizes: list[int] = []
        begin = 0
        for receiver, rows in zip(self._route.ranks, self._route.sends, strict=True):
            end = begin + len(rows)
            head = self._head(receiver, [size for column in self._sized for size in sizes[column.name][begin:end]])
            messages.append(head)
            for column in self._travelling:
                messages += self._rows[column.name][begin:end]
            payload = sum(sum(sizes[column.name][begin:end]) for column in self._travelling)
            send_sizes.append(head.numel() + payload)
            self.bytes_sent += payload
            begin = end
        told = self._tell_sizes(send_sizes)
        self._message = torch.cat(messages)  # read by the collective until it is done
        self._receive_sizes = self._sizes_told(*told) if told else self._sizes_known()
        self._received, self._work = self._transport.all_to_all(
            self._message, send_sizes, self._receive_sizes, self._route.ranks
        )
        self.buffer_bytes = self._message.nbytes + self._received.nbytes

    def _bytes_of(self, rows: Tensor) -> dict[str, list[Tensor]]:
        """The bytes of the held rows at the indices `rows`, by column."""
        index, device = rows.tolist(), self._transport.device
        return {
            column.name: to_bytes(column.cut, self._data[column.name], self._lengths, index, device) if index else []
            for column in self._travelling
        }

    def _head(self, receiver: int, sizes: list[int]) -> Tensor:
        """What the receiver cannot know of the message: the sizes of rows of ragged and JSON columns."""
        head = torch.tensor(sizes, dtype=torch.int64).view(torch.uint8)
        if receiver in self._route.newcomers and self._transport.rank == self._route.introducer:
            introduction = torch.frombuffer(bytearray(self._introduction()), dtype=torch.uint8)
            head = torch.cat([torch.tensor([introduction.numel()]).view(torch.uint8), introduction, head])
        return head.to(self._transport.device)

    def _introduction(self) -> bytes:
        """The forms of columns and the scalars, for a rank that has made nothing."""
        forms = {name: form.to_json() for name, form in self._forms.items()}
        scalars = [column for column in self._columns if column.cut is Cut.SCALAR]
        numbers = {c.name: [Form.of(c.cut, self._data[c.name]).to_json(), self._data[c.name].item()] for c in scalars}
        return json.dumps({"forms": forms, "numbers": numbers}).encode()

    def _be_introduced(self, message: Tensor) -> Tensor:
        """Learn what `_introduction` says; the rest of the message."""
        size = int(message[:_SIZE].clone().view(torch.int64))
        said = json.loads(message[_SIZE : _SIZE + size].cpu().numpy().tobytes())
        self._forms = {name: Form.from_json(form) for name, form in said["forms"].items()}
        for name, (written, number) in said["numbers"].items():
            form = Form.from_json(written)
            self._data[name] = torch.tensor(number, dtype=form.dtype, device=form.device)
        self.metadata_bytes += _SIZE + size
        return message[_SIZE + size :]

    def _tell_sizes(self, send_sizes: list[int]) -> tuple[Tensor, Work] | None:
        """Start to tell receivers how long their messages are, unless all know it."""
        if not self._sized and not self._route.newcomers:
            return None
        ones = [1] * len(send_sizes)
        sizes = torch.tensor(send_sizes, device=self._transport.device)
        return self._transport.all_to_all(sizes, ones, ones, self._route.ranks)

    def _sizes_told(self, sizes: Tensor, work: Work) -> list[int]:
        work.wait()
        self.metadata_bytes += sizes.nbytes
        return [int(size) for size in sizes]

    def _sizes_known(self) -> list[int]:
        return [sum(sum(self._row_sizes(column, rows)) for column in self._travelling) for rows in self._route.receives]

    def _row_sizes(self, column: Column, rows: Tensor) -> list[int]:
        """Bytes of the rows at the positions `rows`, as the row space tells them."""
        width = self._forms[column.name].width
        return [width] * len(rows) if column.cut is Cut.SAMPLE else (self._all_lengths[rows] * width).tolist()

    def _unpack(self) -> dict[str, list[Tensor]]:
        """The bytes of the rows kept and received, by column, in the order of `Route.order`."""
        sent = sum(len(rows) for rows in self._route.sends)
        arrived = {name: pieces[sent:] for name, pieces in self._rows.items()}
        if not self._route.moves:
            return arrived
        messages = list(self._received.split(self._receive_sizes))
        if self._transport.rank in self._route.newcomers:
            introducer = self._route.ranks.index(self._route.introducer)
            messages[introducer] = self._be_introduced(messages[introducer])
        for rows, message in zip(self._route.receives, messages, strict=True):
            count, head_size = len(rows), _SIZE * len(self._sized) * len(rows)
            told = message[:head_size].clone().view(torch.int64).view(len(self._sized), count).tolist()
            sizes = [
                told[self._sized.index(column)] if column in self._sized else self._row_sizes(column, rows)
                for column in self._travelling
            ]
            pieces = message[head_size:].split([size for column_sizes in sizes for size in column_sizes])
            for number, column in enumerate(self._travelling):
                arrived[column.name] += pieces[number * count : (number + 1) * count]
            self.metadata_bytes += head_size
            self.bytes_received += message.numel() - head_size
        del self._message, self._received
        self.buffer_bytes = 0
        return arrived

    def _column(self, column: Column, arrived: dict[str, list[Tensor]]) -> Data:
        data, device = self._data.get(column.name), self._transport.device
        if column.cut is Cut.SCALAR:
            return data
        if not column.home:
            rows = arrived[column.name]
            ordered = [rows[place] for place in self._route.order.tolist()]
            return from_bytes(column.cut, self._forms[column.name], ordered, device)
        if data is None or any(len(rows) for rows in self._route.receives):
            return None
        at_home = to_bytes(column.cut, data, self._lengths, self._route.keeps[self._route.order].tolist(), device)
        return from_bytes(column.cut, Form.of(column.cut, data), at_home, device)


def _data(value: Any, column: Column) -> Data:
    return getattr(value, column.name) if column.name else value
