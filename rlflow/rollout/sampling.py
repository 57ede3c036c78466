"""Makes a `Rollout` from prompts: calls an engine and turns its completions into rows. Without communication.

`sample` is the entry. `SampleIds` gives each response its path and its seed, `_extended` appends what was generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlflow.errors import UserError
from rlflow.rollout.engine import Completion, RolloutEngine, Sampling, picture_argument
from rlflow.values.batch import Batch, Pairs
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import columns, to_device
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.path import RowPath, hashed
from rlflow.values.picture import Picture
from rlflow.values.ragged import Ragged
from rlflow.values.response_settings import ResponseSettings
from rlflow.values.rollout import Ending, Rollout
from rlflow.values.truncation import END, NOTED, SUPPORT


def sample(
    engine: RolloutEngine,
    rows: Batch | Pairs | Rollout,
    parents: RowPath,
    n: int,
    sampling: Sampling,
    *,
    seed: int,
    draw: int,
    node: str,
    version: int,
    decode: Callable[[Sequence[int]], str],
    dtype: torch.dtype = torch.float32,
    part: Part | None = None,
    earlier: Tensor | None = None,
    longest: int | None = None,
    longest_prompt: int | None = None,
    pictures: Sequence[Sequence[Picture]] = (),
    of_prompts: Sequence[ResponseSettings] = (),
    on_end: Callable[[int, str, dict[str, Any]], None] | None = None,
) -> Rollout:
    """Generate `n` responses to each prompt, or `n` continuations of each response, with the policy `version`.

    Every rank that generates calls it with its own rows; ranks that share an engine call it with the same rows. Two
    responses each to the prompts with the ids 4 and 7, where 2 is a stop token and `sampling.max_tokens` is 3:

        path.numbers    response_ids    lengths    finished
        4 0             20 21  2        3          True
        4 1             20  2  0        2          True
        7 0             31 30 33        3          False
        7 1             31  2  0        2          True

    A response that has ended, or has `longest` tokens already, gets one continuation, which is its copy. Inherited
    tokens have their loss mask in each of the `n` continuations: which one trains on them is decided once it is known
    which rows a node returns.

    Args:
        engine: Engine that holds the weights of `version`.
        rows: Prompts, or responses to continue, `B` rows.
        parents: Paths of these `B` rows.
        n: Responses to each prompt, or continuations of each response.
        sampling: Length, temperature and stop tokens.
        seed: Seed of the run. The seed of each response is a function of (seed, draw, node, path, call).
        draw: Number of draws of prompts before this one.
        node: Id of the node that samples.
        version: The policy version that must generate.
        decode: Converts token ids to text.
        dtype: Dtype of the logprobs.
        part: Limits of responses in this call, where long ones are cut off and continued with the next draw.
        earlier: `[B, 2]` int64, see `SampleIds.of`; None where the node did not generate from these rows before.
        longest: Tokens of the longest continued response, inherited ones included. Responses to prompts have
            `sampling.max_tokens` at most.
        longest_prompt: Tokens of the longest prompt, for which memory is planned; None for any.
        pictures: Pictures of the `B` prompts, in the order of their places; empty where no prompt has any.
        of_prompts: Settings of each of the `B` prompts in place of `sampling`, at most `sampling.max_tokens` tokens;
            empty if no prompt has any.
        on_end: Callback for each response that has ended, while others are generated: the number of its row, its text
            and its row of the dataset. None for nothing.

    Returns:
        The responses on the CPU, those of one prompt or of one continued response in consecutive rows: `B * n` rows,
        and fewer where a response was only copied. `T` is the length of the longest.

    Raises:
        UserError: A prompt has more than `longest_prompt` tokens, or responses that were cut off are continued with
            another `n`.
        WeightSyncError: The engine holds another version than `version`.
    """
    bring_over([rows.prompt_ids.values, rows.prompt_ids.lengths])
    prompt_ids = rows.prompt_ids.on_host()
    _require_short(prompt_ids, longest_prompt, node)
    counts = torch.full((len(parents),), n)
    if isinstance(rows, Rollout):
        counts[~on_host(is_unfinished(rows, longest))] = 1
    children = SampleIds.of(parents, counts, node, earlier)
    parent, path, seeds = children.parent, children.path, children.seeds(seed, draw)
    every_prompt = prompt_ids.take(parent)
    most = sampling.max_tokens
    if isinstance(rows, Rollout):
        begun = _inherited(rows, parent, path, dtype)
        most = most if longest is None else longest
    else:
        begun = _without_tokens(every_prompt, path, [rows.rows[i] for i in parent.tolist()], dtype)
        if isinstance(rows.pictures, Ragged):
            begun = replace(begun, pictures=rows.pictures.on_host().take(parent))
        if part is not None and part.begun is not None:
            begun = _begun_before(part.begun, begun)
    of_rows = [of_prompts[i] for i in parent.tolist()] if of_prompts else [ResponseSettings()] * len(parent)
    own = [each.sampling for each in of_rows]
    has_own = any(each is not None for each in own)
    longest_of_rows = torch.tensor([each.max_tokens or most for each in of_rows], dtype=torch.int64)
    room = (
        (longest_of_rows.clamp(max=most) - begun.lengths).clamp(min=0).masked_fill(begun.finished, 0)
    )  # [B * n], none where it has ended
    limits = room.clamp(max=sampling.max_tokens if part is None else part.max_tokens)
    read = [prompt.tolist() + _tokens(begun, row) for row, prompt in enumerate(every_prompt.rows())]
    completions: dict[int, Completion] = {}
    texts: dict[int, str] = {}
    for some in _calls(limits, together=part is None):
        of_each = tuple(limits[some].tolist())
        how = replace(
            sampling,
            max_tokens=max(of_each),
            limits=of_each if len({*of_each}) > 1 else None,
            of_prompts=tuple(own[row] for row in some) if has_own else None,
        )
        asked = [read[row] for row in some], [seeds[row] for row in some], how, version
        seen = picture_argument([pictures[int(parent[row])] for row in some] if pictures else ())
        if on_end is None:
            completions |= zip(some, engine.generate(*asked, **seen), strict=True)
            continue
        for place, completion in engine.completions(*asked, **seen):
            row = some[place]
            completions[row] = completion
            texts[row] = decode([*_tokens(begun, row), *completion.token_ids])
            on_end(row, texts[row], begun.rows[row])
    rollout = _extended(begun, completions, version)
    temperatures = torch.tensor([0.0 if each is None else each.temperature for each in own], dtype=torch.float64)
    return replace(
        rollout,
        temperature=torch.where(rollout.lengths > begun.lengths, temperatures, begun.temperature),
        texts=[texts[row] if row in texts else decode(_tokens(rollout, row)) for row in range(len(read))],
    )


def _require_short(prompts: Ragged, longest: int | None, node: str) -> None:
    found = max(prompts.lengths.tolist(), default=0)
    if longest is not None and found > longest:
        raise UserError(
            f"node `{node}` generates from a prompt of {found} tokens, and `data.max_prompt_length` is {longest}, for"
            " which memory is planned; raise it, or write shorter prompts"
        )


def _calls(limits: Tensor, together: bool) -> list[list[int]]:
    """Indices of the rows that may grow by at least one token, one list for each call of the engine.

    The limits 3, 0, 5, 3 give `[[0, 2, 3]]` in one call, and `[[2], [0, 3]]` in separate ones.

    Args:
        limits: `[B]` int64, how many tokens each row may grow by.
        together: Whether one call gets all of them; else rows of one limit share a call, the largest limit first.
    """
    if together:
        growing: list[int] = limits.nonzero()[:, 0].tolist()
        return [growing] if growing else []
    each = sorted({*limits.tolist()} - {0}, reverse=True)
    return [(limits == limit).nonzero()[:, 0].tolist() for limit in each]


@dataclass(frozen=True)
class Part:
    """Limits of responses in one draw of prompts, where long ones are cut off and continued with the next draw.

    `Part(512)` lets each response grow by up to 512 tokens. The next draw gets `Part(512, begun)`, and the prompts of
    `begun` before its new ones.

    Attributes:
        max_tokens: Tokens that a response may grow by.
        begun: The responses that were cut off, with the others of their groups. They answer the first of the prompts,
            and were sampled with the same settings. None where every response is new.
    """

    max_tokens: int
    begun: Rollout | None = None


def _without_tokens(prompt_ids: Ragged, path: RowPath, rows: list[dict[str, Any]], dtype: torch.dtype) -> Rollout:
    """Responses to these prompts without tokens, with logprobs of this dtype."""
    none = torch.zeros(len(path), 0, dtype=torch.int64)
    zeros = torch.zeros(len(path), dtype=torch.int64)
    return Rollout(
        prompt_ids=prompt_ids,
        response_ids=none,
        loss_mask=none.bool(),
        lengths=zeros,
        logprobs=none.to(dtype),
        finished=zeros.bool(),
        path=path,
        version=zeros,
        versions=none.int(),
        ended=zeros,
        texts=["" for _ in rows],
        rows=rows,
    )


def _inherited(rollout: Rollout, parent: Tensor, path: RowPath, dtype: torch.dtype) -> Rollout:
    """The responses at `parent` `[K]` of `rollout`, copied as the beginnings of their children with these paths."""
    had: Rollout = to_device(rollout, torch.device("cpu")).take(parent)
    return replace(had, path=path, logprobs=had.logprobs.to(dtype), inherited=had.lengths)


def _begun_before(begun: Rollout, new: Rollout) -> Rollout:
    """The responses of `begun`, which were cut off, replace the first of `new`; all their tokens count in the loss.

    Raises:
        UserError: `begun` has another number of responses to a prompt than `new`.
    """
    there: Rollout = to_device(begun, torch.device("cpu"))
    require_continued(there.path, new.path)
    every = there.concat(new.take(torch.arange(len(there.path), len(new.path))))
    places = torch.arange(every.response_ids.shape[1])
    return replace(every, path=new.path, loss_mask=places < every.lengths[:, None])


def _tokens(rollout: Rollout, row: int) -> list[int]:
    """The tokens of one response."""
    tokens: list[int] = rollout.response_ids[row, : rollout.lengths[row]].tolist()
    return tokens


def _extended(begun: Rollout, completions: Mapping[int, Completion], version: int) -> Rollout:
    """The responses with the completion of each row, which `version` generated, appended; others are unchanged.

    Records of earlier tokens stay, though the engine has read these tokens again.
    """
    made = [len(completions[row].token_ids) if row in completions else 0 for row in range(len(begun.path))]
    lengths = begun.lengths + torch.tensor(made, dtype=torch.int64)
    wider = max(lengths.tolist(), default=0) - begun.response_ids.shape[1]
    per_token, ragged, finished = dict[str, Tensor](), dict[str, list[Tensor]](), begun.finished.clone()
    for column in columns(Rollout):
        if column.kind is ColumnKind.TOKEN:
            data = column.of(begun)
            per_token[column.name] = pad(data, (0, 0) * (data.dim() - 2) + (0, wider))
        elif column.per_read_token or column.name in NOTED:
            ragged[column.name] = list(column.of(begun).rows())
    for row, completion in completions.items():
        new = slice(int(begun.lengths[row]), int(lengths[row]))
        entries = {"response_ids": completion.token_ids, "logprobs": completion.logprobs, **completion.columns}
        for name, of_row in {**entries, "versions": version, "loss_mask": True}.items():
            if name in per_token:
                per_token[name][row, new] = torch.as_tensor(of_row, dtype=per_token[name].dtype)
            else:
                had = ragged[name][row]
                known = 0 if name in NOTED else len(had)  # entries that are there, of what the engine read again
                ragged[name][row] = torch.cat([had, torch.as_tensor(of_row)[known:]])
        finished[row] = completion.finished
        if (noted := int((ragged[SUPPORT][row] == END).sum())) not in (0, new.stop):
            raise UserError(
                f"{noted} of the {new.stop} tokens of a response that was continued were sampled with `top_p`, `top_k`"
                " or `min_p`, of the policy or of the dataset's `sampling`; sample all of them with these, or none"
            )
    grown: dict[str, Any] = dict(per_token)
    grown |= {name: Ragged.from_rows(rows, getattr(begun, name).values[:0]) for name, rows in ragged.items()}
    return replace(
        begun,
        **grown,
        lengths=lengths,
        finished=finished,
        version=per_token["versions"][:, 0].long() if made else lengths,  # versions only grow; without rows, none
        ended=torch.where(finished, Ending.DONE, Ending.TOKENS),
    )


def require_continued(begun: RowPath, path: RowPath) -> None:
    """Refuse to continue responses with a different number of responses to each prompt.

    Args:
        begun: Paths of the responses that were cut off.
        path: Paths of all responses that are asked for; they should begin with those of `begun`.

    Raises:
        UserError: They do not: 4 responses to a prompt were cut off, for example, and 8 are asked for.
    """
    if not torch.equal(begun.numbers, path.numbers[: len(begun)]):
        n, before = (int((of.root == path.root[0]).sum()) for of in (path, begun))
        raise UserError(
            f"{before} responses to a prompt were cut off and are to be continued, and {n} are asked for; continue with"
            " the same `group_size`"
        )


def is_unfinished(rollout: Rollout, longest: int | None) -> Tensor:
    """`[B]` bool, the responses that have not ended and may grow to `longest` tokens; None for no limit."""
    left: Tensor = ~rollout.finished
    return left if longest is None else left & (rollout.lengths < longest)


@dataclass(frozen=True)
class SampleIds:
    """Identities of `K` new rows: each has a parent among `B` rows, and rows of one parent are consecutive.

    Two responses each to the prompts with the ids 4 and 7, in a node's first and second call of `generate`:

                       parent     number     call       path.numbers
        first call     0 0 1 1    0 1 0 1    0 0 0 0    4 0,  4 1,  7 0,  7 1
        second call    0 0 1 1    0 1 0 1    1 1 1 1    4 2,  4 3,  7 2,  7 3

    Attributes:
        path: Paths of the `K` rows.
        parent: `[K]` int64, index of each row's parent among the `B` rows.
        number: `[K]` int64, number of each row among its siblings from this call.
        call: `[K]` int64, how often the node generated from its parent before.
    """

    path: RowPath
    parent: Tensor
    number: Tensor
    call: Tensor

    @classmethod
    def of(cls, parents: RowPath, counts: Tensor, node: str, earlier: Tensor | None = None) -> SampleIds:
        """Make `counts` children of each row.

        Args:
            parents: Paths of the `B` parents.
            counts: `[B]` int64, children of each.
            node: Id of the node that makes them; it becomes the last level of their paths.
            earlier: `[B, 2]` int64, how often the node generated from each row before in this draw of prompts, and how
                many rows that made; None for never and none.
        """
        earlier = torch.zeros(len(parents), 2, dtype=torch.int64) if earlier is None else earlier
        calls, made = earlier.unbind(dim=1)
        parent = torch.arange(len(parents)).repeat_interleave(counts)
        path = parents.children(counts, node, first=made)
        return cls(path, parent, path.index - made[parent], calls[parent])

    def seeds(self, run_seed: int, draw: int) -> list[int]:
        """A seed for each of the `K` rows, see `sampling_seed`."""
        return [self.seed(row, run_seed, draw) for row in range(len(self.path))]

    def seed(self, row: int, run_seed: int, draw: int, turn: int = 0, seat: str = "") -> int:
        """The seed of one of the `K` rows, or of a seat such as `opponent` of the game that begins with this row."""
        above = self.path.numbers[row, :-1].tolist()
        node = self.path.levels[-1] + (f"/{seat}" if seat else "")
        return sampling_seed(run_seed, draw, node, above, int(self.number[row]), int(self.call[row]), turn)


def sampling_seed(
    run_seed: int, draw: int, node: str, parent: Sequence[int], child: int, call: int = 0, turn: int = 0
) -> int:
    """The seed of one response, from 0 to 2**63 - 1: a hash of the arguments, so it is the same on any number of ranks.

    `sampling_seed(7, 3, "rollout", (42,), 1)` is the seed of the second response to the prompt with the id 42, in the
    fourth draw of a run with the seed 7.

    Args:
        run_seed: Seed of the run.
        draw: Number of draws of prompts before this one.
        node: Id of the node that samples.
        parent: Path of the row that is answered or continued; `(id,)` of a prompt.
        child: Number of the response among those to this parent in this call.
        call: Number of times that this node generated from this parent before, in this draw. It counts for the row,
            not for the rank, so it does not depend on which rank has the row.
        turn: Turn of the response, from 0.
    """
    where = node + (f"#{call}" if call else "") + (f"@{turn}" if turn else "")
    key = f"{run_seed}/{draw}/{'.'.join(map(str, parent))}/{child}/{where}"
    return hashed(key) >> 1


def without_truncated(rollout: Rollout, longest: int) -> Rollout:
    """The same responses, with truncated ones removed from the loss.

    A response that no stop token ended has False in the loss mask. If it has fewer than `longest` tokens, those that it
    inherits from the response it continues keep their mask. Otherwise they are trained in a sibling, if that has ended.
    Called after a node has generated, where the module sets `mask_truncated`.
    """
    kept = rollout.finished[:, None] | (rollout.inherited_mask & is_unfinished(rollout, longest)[:, None])
    return replace(rollout, loss_mask=rollout.loss_mask & kept)


def to_be_continued(rollout: Rollout, longest: int) -> Rollout:
    """The same responses, with tokens that `without_truncated` removed back in the loss, if they are continued.

    These are the own tokens of responses that have not ended and have fewer than `longest` tokens: they were cut in
    order to be continued. Called before a node continues them, where the module sets `mask_truncated`.
    """
    places = torch.arange(rollout.loss_mask.shape[1], device=rollout.loss_mask.device)
    own = (places < rollout.lengths[:, None]) & ~rollout.inherited_mask
    return replace(rollout, loss_mask=rollout.loss_mask | (own & is_unfinished(rollout, longest)[:, None]))
