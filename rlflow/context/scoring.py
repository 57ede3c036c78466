"""What a reward reads of samples, and the scores that a reward gives on several ranks, which agree on its parts."""

from __future__ import annotations

import json
from dataclasses import replace

from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.rewards.reward import Reward, RewardInput, Scores, TrainerState, scored
from rlflow.values.host_copy import on_host
from rlflow.values.protocols import Written


def reward_input(rollout: Written, prompt_column: str | None, state: TrainerState) -> RewardInput:
    """This rank's samples as a reward reads them; token ids are computed only if the reward asks for them.

    Args:
        rollout: The samples.
        prompt_column: Column of the prompt in the dataset's rows, see `RewardInput`.
        state: Where the run is: its step and epoch.
    """

    def token_ids() -> list[list[int]]:
        lengths = on_host(rollout.lengths).tolist()
        return [ids[:length] for ids, length in zip(on_host(rollout.response_ids).tolist(), lengths, strict=True)]

    return RewardInput(rollout.texts, rollout.rows, prompt_column, rollout.messages, token_ids, state)


def scored_alike(reward: Reward, responses: RewardInput, ranks: tuple[int, ...], transport: Transport) -> Scores:
    """Score this rank's samples; a collective of `ranks`, which compare the names of the parts.

    A rank without samples, or whose samples all failed, gets the parts of the others, so that all log the same names.

    Args:
        reward: The reward.
        responses: This rank's samples.
        ranks: Ranks that score together.
        transport: Collectives between these ranks.

    Raises:
        UserError: On all of these ranks: scoring failed on one, or two have different parts.
    """
    failure: UserError | None = None
    try:
        scores = reward.settled(scored(reward, responses), responses)
    except UserError as error:
        scores, failure = Scores([]), error
    failed_all = len(scores.failed) == len(scores.total)  # as where there are no samples
    here = {
        "problem": str(failure or ""),
        "parts": None if failed_all and not scores.parts else sorted(scores.parts),
    }
    of_ranks = [json.loads(each) for each in transport.gather_bytes(json.dumps(here).encode(), ranks)]
    for rank in of_ranks:
        if rank["problem"]:
            raise UserError(rank["problem"]) from failure
    known = [rank["parts"] for rank in of_ranks if rank["parts"] is not None]
    for names in known:
        if other := sorted(set(names) ^ set(known[0])):
            raise UserError(
                f"{reward} gave part `{other[0]}` for some samples and not for others; return the same parts for"
                " every response"
            )
    names = known[0] if known else []
    return replace(scores, parts={name: scores.parts.get(name, [0.0] * len(scores.total)) for name in names})
