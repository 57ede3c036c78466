"""`Harness`, a user's description of an agent that owns its loop and calls the policy by HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from rlflow.dotted_path import function_at
from rlflow.environments.environment import Definition, Environment, OnFailure
from rlflow.environments.host import Host, HostError
from rlflow.environments.session import is_number
from rlflow.errors import UserError, did_you_mean
from rlflow.harness.door import Door, OpenEpisode, check_installed
from rlflow.worker import Limits, Worker, WorkerError

LARGEST_FILE_MB = 2**20  # an agent may clone and download what it needs
COMMAND = "rlflow.harness.command.run"
READ = frozenset(["model", "messages", "input", "prompt"])  # fields that say which policy answers what


class Harness(Environment):
    """An agent that owns its loop: it calls the policy as a model behind OpenAI's or Anthropic's API.

        async def solve(row, base_url, api_key):              # `Harness("my_agent.solve")`
            client = AsyncOpenAI(base_url=base_url, api_key=api_key)
            asked = [{"role": "user", "content": row["question"]}]
            answer = await client.chat.completions.create(model="policy", messages=asked)
            return float(answer.choices[0].message.content == row["answer"])

    The agent gets a row of the dataset, and returns the reward of the episode: a number, or a mapping with `reward`.
    The policy's answers become rows, see `rlflow.harness.tree.rows_of`, and each row has the reward of the episode.
    The mapping may also have `branches`, rewards of some rows: `{"reward": 1.0, "branches": {"search": 0.2}}`. Then
    rows whose last request has `metadata: {"branch": "search"}` get 0.2. If the agent is a program, it gets the row as
    JSON on its standard input, and prints the reward in its last line, see `rlflow.harness.command.run`.

    Args:
        run: Dotted path of a function `(row, base_url, api_key)`, plain or `async`; or a program with its arguments, as
            a list.
        timeout_s: Time limit of an episode. Each episode runs in a process, which is then killed with all that it
            started.
        max_concurrent: Maximum number of episodes of a rank that are in progress at the same time.
        max_calls: Maximum number of answers that an episode gets; further calls are refused.
        model: The name by which the agent calls the policy.
        other_models: Further names that the agent calls. The policy answers to these names too, unless a node gives
            them to another policy by `players`, see `CausalLM.converse`.
        ignore: Fields of requests that are ignored, such as `temperature`. Requests with other fields that cannot be
            served are refused.
        memory_mb: Memory limit of each process, in MB; None for no limit.
        on_failure: Treatment of an episode whose agent raises, takes too long or dies: `raise` ends the run, `zero`
            gives the episode the reward 0, `mask` also leaves it out of the loss.

    Raises:
        UserError: There is no such function, or a setting is not possible.
    """

    def __init__(
        self,
        run: str | Sequence[str],
        timeout_s: float = 600.0,
        max_concurrent: int = 32,
        max_calls: int = 64,
        model: str = "policy",
        other_models: Sequence[str] = (),
        ignore: Collection[str] = (),
        memory_mb: int | None = 4096,
        on_failure: OnFailure = "raise",
    ) -> None:
        for name, count in {"max_concurrent": max_concurrent, "max_calls": max_calls}.items():
            if count < 1:
                raise UserError(f"`{name}` is {count}; give 1 or more")
        if not run:
            raise UserError("`run` is empty; give the dotted path of a function, or a program with its arguments")
        super().__init__(
            environment=Harness, max_turns=max_calls, timeout_s=timeout_s, workers=max_concurrent, on_failure=on_failure
        )
        self.run = run if isinstance(run, str) else list(run)
        self.max_concurrent = max_concurrent
        self.max_calls = max_calls
        self.model = model
        self.models = (model, *([other_models] if isinstance(other_models, str) else other_models))
        self.ignore = frozenset([ignore] if isinstance(ignore, str) else ignore)
        if read := self.ignore & READ:
            raise UserError(f"`ignore` has {sorted(read)[0]!r}, without which no request can be answered; leave it out")
        self.limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb, file_mb=LARGEST_FILE_MB)

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        check_installed()
        if isinstance(self.run, str):
            function_at(self.run, f"`run` is {self.run!r}")
        elif shutil.which(self.run[0]) is None:
            raise UserError(f"`run` begins with {self.run[0]!r}, and there is no such program; name one, or its path")
        return {"": Definition({}, str(self), answers_messages=True, repeats=True)}

    def seats_of(self, policy: str, players: Mapping[str, str]) -> tuple[str, ...]:
        """One seat without a name: a row has the answers of `policy`, by whichever name it was called.

        Raises:
            UserError: The agent calls no such name, or none is left.
        """
        for name in players:
            if name not in self.models:
                raise UserError(
                    f"`players` has `{name}`, and the harness `{self}` calls {', '.join(self.models)}."
                    f"{did_you_mean(name, self.models) or ' Add the name to its `other_models`'}"
                )
        if all(players.get(name, policy) != policy for name in self.models):
            raise UserError(
                f"`players` has all names that the harness `{self}` calls, {', '.join(self.models)}, so none is left"
                " for the model that converses; leave one out"
            )
        return ("",)

    def rewards_of(
        self, worker: Worker, row: Mapping[str, Any], base_url: str, key: str, seed: int
    ) -> tuple[float, dict[str, float]]:
        """Run the agent on a row, and return its reward and the rewards of branches by name; all its processes end.

        Raises:
            WorkerError: It failed, or gave no finite number.
        """
        worker.adopt()
        if isinstance(self.run, str):
            worker.begin(seed, [self.run])
        try:
            if isinstance(self.run, str):
                given = worker.function(self.run, row, base_url, key)
            else:
                given = worker.function(COMMAND, self.run, row, base_url, key, self.model)
            return _rewards(given, f"`{self}`")
        finally:
            worker.close_if_others_run()

    def __str__(self) -> str:
        return self.run if isinstance(self.run, str) else " ".join(self.run)


def play(
    harness: Harness,
    host: Host,
    row: Mapping[str, Any],
    seed: int,
    number: int,
    name: str,
    door: Door | None,
    arrive: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the agent of an episode with a key of its own.

    Args:
        harness: The agent.
        host: The worker in which it runs.
        row: Row of the dataset.
        seed: Seed of its draws from `random` and NumPy.
        number: Number of the episode in its loop.
        name: Names the episode and its row in the log.
        door: Server through which it calls the policy; the rank that runs agents has one.
        arrive: Callback for each of its requests, in another thread.

    Returns:
        `reward` and `branches`, or why it `failed`; and `delivered`, the ids of the requests that were answered.
    """
    assert isinstance(host, Worker)
    assert door is not None
    key = door.open(OpenEpisode(number, name, harness.models, arrive))
    delivered: list[int] = []
    outcome: dict[str, Any] = {"delivered": delivered}
    try:
        outcome["reward"], outcome["branches"] = harness.rewards_of(host, row, f"{door.url}/v1", key, seed)
    except WorkerError as error:
        outcome["failed"] = str(error).replace(key, "(its key)")
    finally:
        delivered += door.end(key)
    return outcome


def _rewards(given: Any, where: str) -> tuple[float, dict[str, float]]:
    if not isinstance(given, Mapping):
        return _reward(given, where), {}
    branches = given.get("branches", {})
    if not isinstance(branches, Mapping):
        raise HostError(f"{where} gave `branches` as {branches!r:.60}; give rewards by the name of a branch")
    return _reward(given.get("reward"), where), {str(name): _reward(each, where) for name, each in branches.items()}


def _reward(found: Any, where: str) -> float:
    if not is_number(found):
        raise HostError(f"{where} gave the reward {found!r:.60}; give a finite number, or a mapping with `reward`")
    return float(found)
