"""A row space as bytes, for ranks that did not make its rows."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from torch import Tensor

from rlflow.databuffer.balance import Balance
from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.partition import Partition
from rlflow.databuffer.rows import NUMBERS, ROOT, RowSpace
from rlflow.values.layout import Layout

_SIZE = torch.int64.itemsize


def space_to_message(space: RowSpace) -> Tensor:
    """The rows, and where they lie in every layout that cannot be worked out from them, as uint8."""
    known = {space.home[0]: space.home[1]} | space.dealt
    layouts = [[asdict(layout), [len(rows) for rows in dealt.shards]] for layout, dealt in known.items()]
    header = json.dumps({"rows": len(space), "levels": space.levels, "layouts": layouts}).encode()
    header += b" " * (-len(header) % _SIZE)  # the numbers behind it are read in place
    arrays = [space.path.flatten(), *(getattr(space, name) for name in NUMBERS), space.dropped.long()]
    positions = [rows for dealt in known.values() for rows in dealt.shards]
    body = torch.cat([torch.tensor([len(header)]), *arrays, *positions]).view(torch.uint8)
    return torch.cat([body[:_SIZE], to_message(header), body[_SIZE:]])


def space_from_message(message: Tensor, name: str, *, seed: int, step: int, balance: Balance) -> RowSpace:
    """The space that `space_to_message` wrote, the same as at the sender's.

    Args:
        message: Bytes.
        name: Of the rows.
        seed: Of the run.
        step: Of the run.
        balance: Whether rows may move to even out tokens.
    """
    message = message.cpu()
    size = int(message[:_SIZE].clone().view(torch.int64))
    header = json.loads(from_message(message[_SIZE : _SIZE + size]))
    body = message[_SIZE + size :].clone().view(torch.int64)
    rows, depth = header["rows"], len(header["levels"])
    of_rows = [depth * rows, *[rows] * len(NUMBERS), rows]
    path, *numbers, dropped, positions = body.split([*of_rows, len(body) - sum(of_rows)])
    numbered = dict(zip(NUMBERS, numbers, strict=True))
    arrays = {"path": path.view(rows, depth), **numbered, "dropped": dropped.bool()}
    known: dict[Layout, Partition] = {}
    for written, sizes in header["layouts"]:
        layout = Layout(**{**written, "ranks": tuple(written["ranks"])})
        known[layout] = Partition(tuple(positions[: sum(sizes)].split(sizes)))
        positions = positions[sum(sizes) :]
    home = next(iter(known.items()))
    above = tuple(header["levels"][:-1]) or ROOT
    return RowSpace.known(name, arrays, home, known, seed=seed, step=step, balance=balance, above=above)
