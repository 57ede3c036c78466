"""`ConversationRunner` runs the conversations of a node's rows on this rank, with environments, engines and seeds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch

from rlflow.databuffer.transport import Transport
from rlflow.environments.bridge import BRIDGES, Bridge, Message, PictureBridge
from rlflow.environments.environment import Definition, Environment, Tool
from rlflow.environments.host import Coroutines, Host
from rlflow.environments.session import Session
from rlflow.errors import UserError
from rlflow.harness.door import Door, ignored
from rlflow.harness.episode import Episode, EpisodeEnd, EpisodeSettings
from rlflow.harness.harness import Harness, play
from rlflow.metrics import StepMetrics
from rlflow.models.picture_processor import no_pictures
from rlflow.rewards.early import OnEnd
from rlflow.rollout.conversation import (
    Conversation,
    Rules,
    add_group_rewards,
    converse,
    from_rollout,
    messages_of,
    play_game,
    to_rollout,
)
from rlflow.rollout.conversation_loop import (
    ConversationLoop,
    ConversationSteps,
    EnvironmentCalls,
    SharedCalls,
    TurnQueue,
)
from rlflow.rollout.engine import RolloutEngine, Sampling
from rlflow.rollout.sampling import Part, SampleIds, require_continued
from rlflow.values.columns import to_device
from rlflow.values.layout import Layout
from rlflow.values.not_sent import NotSent
from rlflow.values.path import RowPath
from rlflow.values.picture import Picture
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Ending, Rollout
from rlflow.values.truncation import Truncation
from rlflow.worker import Worker

TOOLLESS = Definition({}, answers_messages=True, repeats=True)
BEFORE = -1  # the turn whose seed is the environment's: it draws before the policy's first
ROUND_S = 5.0  # after which ranks that share an engine are informed that no environment has answered yet


@lru_cache(maxsize=BRIDGES)
def _with_tools(schemas: str) -> Definition:
    """The definition of an agent whose requests have tools with this JSON."""
    tools = json.loads(schemas)
    names = [each["function"]["name"] for each in tools]
    made = [Tool(name, each, method=False, path="") for name, each in zip(names, tools, strict=True)]
    return Definition(dict(zip(names, made, strict=True)), repeats=True)


@dataclass(frozen=True)
class EpisodeCounts:
    """Counts of this rank's episodes of a harness.

    Attributes:
        count: Number of episodes.
        refused: Number of requests that were refused.
        undelivered: Number of answers for which nobody waited any more.
        rewritten: Number of requests in which the chat template wrote the policy's earlier turns in other words.
    """

    count: int
    refused: int
    undelivered: int
    rewritten: int


@dataclass(frozen=True)
class ConversationTimes:
    """Times of the conversations of one `converse` call on this rank, and their waits.

    Attributes:
        waits: Waits of the first conversations, see `ConversationLoop`.
        count: Conversations that were run; a game of several seats counts once.
        calls: Seconds in calls of environments, summed over the calls; waiting for their turn does not count.
        idle: Seconds in which this rank waited for environments, and no turn was in progress.
        whole: Seconds from the first turn to the last group reward.
        episodes: Counts from episodes of a harness; None in conversations with an environment.
    """

    waits: Sequence[tuple[str, int, float, float]]
    count: int
    calls: float
    idle: float
    whole: float
    episodes: EpisodeCounts | None = None


@dataclass(frozen=True)
class ConverseCall:
    """The arguments of a `converse` call that describe its node and policies.

    Attributes:
        draw: Number of the draw of prompts, from 0; it goes into the seeds.
        node: Name of the node that calls.
        policy: Policy that the returned rows are of.
        versions: Version of the weights that a policy's engine must hold, by policy that takes turns.
        layout: Layout of the node's rows; ranks that share an engine run the same conversations.
        players: Policy that plays a seat in place of `policy`, its temperature and its truncation, by seat.
        rows_of: Ids of prompts `[N]` to their places in the dataset `[N]`.
        part: Limits of conversations in this call, with `trainer.partial_rollout`; None for whole ones.
        stop_token_ids: Tokens that end every turn of a policy, in addition to those of the sampling.
    """

    draw: int
    node: str
    policy: str
    versions: Mapping[str, int]
    layout: Layout
    players: Mapping[str, tuple[str, float, Truncation]] = field(default_factory=dict)
    rows_of: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
    part: Part | None = None
    stop_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class ConversationRunner:
    """Runs the conversations of nodes and of validation on one rank.

    Attributes:
        bridge: An environment's definition to the bridge that turns its messages into tokens, and tokens into messages.
        messages: A row of the dataset to the messages of its prompt.
        longest_prompt: Tokens of a conversation's first prompt, at most.
        decode: Token ids to text.
        dtype: Dtype of log-probabilities and rewards.
        seed: Seed of the run.
        transport: Collectives with the ranks that share an engine.
        album: Numbers of pictures to the pictures.
        expand: Ids with one placeholder for each picture, and the pictures, to a row's ids; None for a model of text.
    """

    bridge: Callable[[Definition], Bridge]
    messages: Callable[[dict[str, Any]], Sequence[Message]]
    longest_prompt: int
    decode: Callable[[Sequence[int]], str]
    dtype: torch.dtype
    seed: int
    transport: Transport
    album: Callable[[Sequence[int]], Sequence[Picture]] = no_pictures
    expand: Callable[[Sequence[int], Sequence[Picture]], list[int]] | None = None
    _hosts: EnvironmentHosts = field(default_factory=lambda: EnvironmentHosts(), init=False)
    _door: Door | None = field(default=None, init=False)

    def run(
        self,
        engines: Mapping[str, RolloutEngine],
        environment: Environment,
        rows: Sequence[dict[str, Any]],
        parents: RowPath,
        n: int,
        sampling: Sampling,
        call: ConverseCall,
        earlier: torch.Tensor | None = None,
        on_end: OnEnd | None = None,
        pictures: Ragged | NotSent | None = None,
    ) -> tuple[Rollout, list[Conversation], ConversationTimes]:
        """Run `n` conversations from each prompt; called by all ranks that share an engine, with the same rows.

        Args:
            engines: This rank's engines by policy that takes turns; each holds the weights of its policy's version.
            environment: Environment that answers the policy.
            rows: `B` rows of the dataset.
            parents: Paths of these rows.
            n: Conversations from each row.
            sampling: Tokens of a whole conversation, what the environment writes included; `max_turn_length` of the
                environment may limit a turn further.
            call: The node, and the versions of its policies.
            earlier: See `SampleIds.of`, so that seeds and paths differ from those of earlier calls.
            on_end: Callback for each conversation that is over, while others are in progress; not called if the
                environment still rewards its group. None for nothing.
            pictures: Numbers of the pictures of each prompt, see `Batch`; None where no prompt has any.

        Returns:
            The rows on the CPU, `n` for each prompt and each seat of the policy, those of one prompt consecutive; the
            conversation of each row; and how long they took.

        Raises:
            UserError: An environment failed and its `on_failure` is `raise`, or an engine refused a turn.
        """
        seats = environment.seats_of(call.policy, {seat: policy for seat, (policy, *_) in call.players.items()})
        if isinstance(environment, Harness):
            if isinstance(pictures, Ragged) and len(pictures.values):
                raise UserError(
                    "the dataset's rows have images in their prompts, and an agent that owns its loop writes its own"
                    " prompts, of text; take rows without images"
                )
            return self._run_harness(engines, environment, rows, parents, n, sampling, call, earlier)
        children = SampleIds.of(parents, torch.full((len(parents),), n * len(seats)), call.node, earlier)
        of_all = [rows[i] for i in children.parent.tolist()]
        of_each = pictures.on_host().take(children.parent) if isinstance(pictures, Ragged) else None
        numbers = [[]] * len(of_all) if of_each is None else [each.tolist() for each in of_each.rows()]
        places = call.rows_of(parents.root)[children.parent].tolist()
        max_concurrent = environment.workers or max(1, len(of_all))
        calls = EnvironmentCalls(
            environment.max_concurrent_calls, self._shared(call.layout), environment.workers is not None
        )
        rules = self._rules(environment, sampling.max_tokens, call)
        of_dataset = list(zip(places, of_all, strict=True))
        begun = self._begun(environment, of_dataset, children.path, call.part, numbers)
        results: dict[int, list[Conversation]] = {row: [each] for row, each in begun.items() if each.was_over}
        open_rows = [row for row in range(0, len(of_all), len(seats)) if row not in results]
        each = (
            self._conversation(
                environment,
                of_dataset[row],
                partial(self._seed_of, children, row),
                rules,
                call,
                begun.get(row),
                numbers[row],
            )
            for row in open_rows
        )
        started = time.perf_counter()
        queues = self._queues(engines, environment, sampling, call)

        def ended(number: int, views: Sequence[Conversation]) -> None:
            for row, view in enumerate(views, open_rows[number]):
                if on_end is not None and not environment.definition_of(of_all[row]).rewards_groups:
                    on_end(row, self.decode(view.last_turn[0]), of_all[row], messages_of(view))

        loop = ConversationLoop[list[Conversation]](queues, calls, environment.lockstep, ended)
        try:
            results |= zip(open_rows, loop.run(each, max_concurrent), strict=True)
            seconds = sum(calls.seconds)
            conversations = [view for row in sorted(results) for view in results[row]]
            seed = partial(self._seed_of, children, seat="", turn=BEFORE, draw=call.draw)
            groups = self._groups(environment, conversations, children, of_dataset, rules, seed)
            ConversationLoop[None]({}, calls).run(groups, max_concurrent)
        except BaseException:
            self._hosts.cancel()
            raise
        finally:
            calls.close()
        whole = time.perf_counter() - started
        times = ConversationTimes(loop.waits, len(open_rows), seconds, calls.waited, whole)
        version, cut_off = call.versions[call.policy], call.part is not None
        rollout = to_rollout(conversations, children.path, of_all, version, self.decode, self.dtype, cut_off, of_each)
        view = torch.arange(len(conversations)) % max(1, len(seats))  # number of each row among those of its game
        return replace(rollout, branch=view), conversations, times

    def close(self) -> None:
        """End the processes of environments, and the server of harnesses; at the end of the run."""
        self._hosts.close()
        if self._door is not None:
            self._door.close()
            self._door = None

    def _run_harness(
        self,
        engines: Mapping[str, RolloutEngine],
        harness: Harness,
        rows: Sequence[dict[str, Any]],
        parents: RowPath,
        n: int,
        sampling: Sampling,
        call: ConverseCall,
        earlier: torch.Tensor | None,
    ) -> tuple[Rollout, list[Conversation], ConversationTimes]:
        """Run `n` episodes from each prompt; as `run`, but an episode has one row or more."""
        children = SampleIds.of(parents, torch.full((len(parents),), n), call.node, earlier)
        places = call.rows_of(parents.root)[children.parent].tolist()
        shared = self._shared(call.layout)
        if self._door is None and (shared is None or shared.calls):
            self._door = Door()
        queues = self._queues(engines, harness, sampling, call)
        calls = EnvironmentCalls(harness.max_concurrent, shared, limited=False)
        lengths = self.longest_prompt, sampling.max_tokens
        stops = frozenset(chain.from_iterable(queue.sampling.stop_token_ids for queue in queues.values()))
        policies = {name: call.players.get(name, (call.policy, sampling.temperature))[:2] for name in harness.models}
        settings = EpisodeSettings(harness, call.policy, policies, *lengths, self._bridge_of, stops, self.decode)
        answer = ignored if self._door is None else self._door.answer  # a rank that shares an engine has no door
        in_progress: dict[int, Episode] = {}

        def steps(number: int) -> ConversationSteps[EpisodeEnd]:
            row, seed = rows[int(children.parent[number])], self._seed_of(children, number, "", BEFORE, call.draw)
            worker = self._hosts.take(harness, seed)
            session = Session(harness.definition_of(row), worker, row, place=places[number])
            of_row = int(children.path.numbers[number, -1])
            episode = in_progress[number] = Episode(settings, of_row, session, self.messages(row), seed, answer)
            name = str(episode)
            end = yield from episode.steps(
                partial(play, harness, worker, row, seed, number, name, self._door, calls.arrive)
            )
            del in_progress[number]
            self._hosts.give_back(harness, worker)
            return end

        def arrived(sent: Mapping[str, Any]) -> Sequence[ConversationSteps[None]]:
            episode = in_progress.get(sent["episode"])
            return [] if episode is None else episode.arrived(sent)

        started = time.perf_counter()
        loop = ConversationLoop[EpisodeEnd](queues, calls, on_arrival=arrived)
        try:
            ends = loop.run(map(steps, range(len(children.path))), harness.max_concurrent)
        except BaseException:
            self._hosts.kill()  # so that no agent is waited for
            while not calls.close():  # one may have started since
                self._hosts.kill()
            raise
        finally:
            calls.close()
        views = [view for end in ends for view in end.rows]
        counts = torch.tensor([len(end.rows) for end in ends], dtype=torch.int64).view(len(parents), n).sum(dim=1)
        path = parents.children(counts, call.node, None if earlier is None else earlier[:, 1])
        whole = time.perf_counter() - started
        counted = EpisodeCounts(
            count=len(ends),
            refused=sum(end.refused for end in ends),
            undelivered=sum(end.undelivered for end in ends),
            rewritten=sum(end.rewritten for end in ends),
        )
        if self._door is not None:
            counted = replace(counted, refused=counted.refused + self._door.refused())
        times = ConversationTimes(loop.waits, len(ends), sum(calls.seconds), calls.waited, whole, counted)
        of_rows = [row for row, count in zip(rows, counts.tolist(), strict=True) for _ in range(count)]
        rollout = to_rollout(views, path, of_rows, call.versions[call.policy], self.decode, self.dtype)
        inherited = torch.tensor([each for end in ends for each in end.inherited], dtype=torch.int64)
        branch = torch.tensor([number for end in ends for number in range(len(end.rows))], dtype=torch.int64)
        made_by = Ragged.from_lists([each for end in ends for each in end.calls])
        return replace(rollout, inherited=inherited, branch=branch, calls=made_by), views, times

    def _bridge_of(self, tools: Sequence[Mapping[str, Any]]) -> Bridge:
        """The bridge that writes the turns of requests with these tools."""
        if not tools:
            return self.bridge(TOOLLESS)
        return self.bridge(_with_tools(json.dumps(tools)))

    def _begun(
        self,
        environment: Environment,
        rows: Sequence[tuple[int, dict[str, Any]]],
        path: RowPath,
        part: Part | None,
        numbers: Sequence[Sequence[int]],
    ) -> dict[int, Conversation]:
        """The conversations of groups that an earlier draw cut off, by row, with those of them that are over."""
        if part is None or part.begun is None:
            return {}
        there: Rollout = to_device(part.begun, torch.device("cpu"))
        require_continued(there.path, path)
        begun = {}
        for row, (place, of_row) in enumerate(rows[: len(there.path)]):
            definition, idle = environment.definition_of(of_row), environment.host()  # which never starts
            session = Session(definition, idle, of_row, place=place)
            begun[row] = from_rollout(there, row, session, self._bridge(definition, numbers[row]))
        return begun

    def _bridge(self, definition: Definition, numbers: Sequence[int]) -> Bridge:
        """The bridge of a conversation whose prompt has the pictures of these numbers."""
        bridge = self.bridge(definition)
        if not numbers:
            return bridge
        assert self.expand is not None
        return PictureBridge(bridge, self.album(numbers), self.expand)

    def _conversation(
        self,
        environment: Environment,
        of_dataset: tuple[int, dict[str, Any]],
        seed_of: Callable[[str, int, int], int],
        rules: Rules,
        call: ConverseCall,
        begun: Conversation | None,
        numbers: Sequence[int],
    ) -> ConversationSteps[list[Conversation]]:
        """One conversation from its beginning, or from where it was cut off; in a game the views of the policy's seats.

        Args:
            environment: Environment that answers the policy.
            of_dataset: The row's place in the dataset, and the row.
            seed_of: `(seat, turn, draw)` to the seed of that turn, for a conversation that began at that draw.
            rules: Limits of the conversation.
            call: The node, and the versions of its policies.
            begun: The conversation as far as it got; None for a new one.
            numbers: Numbers of the pictures of its prompt.
        """
        place, row = of_dataset
        definition = environment.definition_of(row)
        if definition.seats:

            def seed_now(seat: str, turn: int) -> int:
                return seed_of(seat, turn, call.draw)

            return (yield from self._game(environment, of_dataset, seed_now, rules, call, numbers))
        bridge, prompt = self._bridge(definition, numbers), self.messages(row)
        draw = call.draw if begun is None else begun.draw
        key = seed_of("", BEFORE, draw)
        restarted = begun is not None and begun.state is None and not self._hosts.waits(key)
        begun = None if restarted else begun
        host = self._hosts.take(environment, key)
        open_turn = begun.turns - 1 if begun is not None and begun.turn_open else None
        made = 0 if begun is None else begun.calls
        session = Session(definition, host, row, environment.max_tool_calls, key, place, made)

        def seed_of_turn(turn: int) -> int:
            """Seed of a turn. The rest of an open turn is sampled with other noise than its beginning."""
            return seed_of("", turn, call.draw if turn == open_turn else draw)

        if begun is not None:
            begun.session = session
        conversation = yield from converse(session, bridge, prompt, row, seed_of_turn, rules, begun)
        conversation.draw, conversation.restarted = draw, restarted
        if conversation.ended is None and conversation.state is None:
            self._hosts.keep(key, host)
        else:
            self._hosts.give_back(environment, host)
        return [conversation]

    def _game(
        self,
        environment: Environment,
        of_dataset: tuple[int, dict[str, Any]],
        seed_of: Callable[[str, int], int],
        rules: Rules,
        call: ConverseCall,
        numbers: Sequence[int],
    ) -> ConversationSteps[list[Conversation]]:
        (place, row), key = of_dataset, seed_of("", BEFORE)
        definition = environment.definition_of(row)
        bridge, prompt = self._bridge(definition, numbers), self.messages(row)
        policies = {seat: call.players.get(seat, (call.policy,))[0] for seat in definition.seats}
        of_seats = {seat: replace(rules, policy=policy) for seat, policy in policies.items()}
        host = self._hosts.take(environment, key)
        views = yield from play_game(
            Session(definition, host, row, seed=key, place=place), bridge, prompt, row, seed_of, of_seats
        )
        self._hosts.give_back(environment, host)
        return [view for seat, view in views.items() if policies[seat] == call.policy]

    def _groups(
        self,
        environment: Environment,
        conversations: Sequence[Conversation],
        children: SampleIds,
        rows: Sequence[tuple[int, dict[str, Any]]],
        rules: Rules,
        seed_of: Callable[[int], int],
    ) -> Iterator[ConversationSteps[None]]:
        """For each prompt whose conversations are all over, what adds the environment's group rewards to them."""
        groups: dict[int, list[int]] = {}
        for place, parent in enumerate(children.parent.tolist()):
            if environment.definition_of(rows[place][1]).rewards_groups:
                groups.setdefault(parent, []).append(place)
        for places in groups.values():
            if any(conversations[place].ended is None for place in places):
                continue
            group = [conversations[place] for place in places if conversations[place].ended != Ending.FAILED]
            if group:
                yield self._group(environment, group, rows[places[0]], rules, seed_of(places[0]))

    def _group(
        self,
        environment: Environment,
        group: Sequence[Conversation],
        of_dataset: tuple[int, dict[str, Any]],
        rules: Rules,
        seed: int,
    ) -> ConversationSteps[None]:
        host, (place, row) = self._hosts.take(environment, seed), of_dataset
        session = Session(environment.definition_of(row), host, row, seed=seed, place=place)
        yield from add_group_rewards(session, group, row, rules)
        self._hosts.give_back(environment, host)

    def _queues(
        self,
        engines: Mapping[str, RolloutEngine],
        environment: Environment,
        sampling: Sampling,
        call: ConverseCall,
    ) -> dict[str, TurnQueue]:
        """The turns of each policy, each sampled in its own way; what ends a turn is alike on all ranks."""
        ends = {end: None for each in environment.definitions.values() for end in self.bridge(each).ends}
        each = {name: replace(sampling, temperature=t, truncation=cut) for name, t, cut in call.players.values()}
        each[call.policy] = sampling
        for name, how in each.items():
            stops = (*call.stop_token_ids.get(name, ()), *sampling.stop_token_ids, *ends)
            each[name] = replace(how, stop_token_ids=stops)
        return {name: TurnQueue(engine, each[name], call.versions[name]) for name, engine in engines.items()}

    def _seed_of(self, children: SampleIds, row: int, seat: str, turn: int, draw: int) -> int:
        return children.seed(row, self.seed, draw, turn, seat)

    def _rules(self, environment: Environment, longest: int, call: ConverseCall) -> Rules:
        return Rules(
            call.policy,
            environment.max_turns,
            self.longest_prompt,
            longest,
            min(longest, environment.max_turn_length or longest),
            environment.on_failure,
            None if call.part is None else call.part.max_tokens,
        )

    def _shared(self, layout: Layout) -> SharedCalls | None:
        if layout.copies == 1:
            return None
        transport = self.transport
        peers = layout.peers(layout.shard(transport.rank))
        limit = transport.timeout
        seconds = ROUND_S if limit is None else min(ROUND_S, limit.total_seconds() / 4)
        leads = layout.is_leader(transport.rank)
        return SharedCalls(leads, lambda message: transport.gather_bytes(message, peers)[0], seconds)


class EnvironmentHosts:
    """Hosts that run environments' code: in this process, or in worker processes that later conversations reuse."""

    def __init__(self) -> None:
        self._coroutines = Coroutines()
        self._free: dict[Environment, list[Host]] = {}
        self._waiting: dict[int, Host] = {}
        self._processes: list[Host] = []

    def take(self, environment: Environment, conversation: int) -> Host:
        """A host for a conversation: the host that waits for it, else a free host, else a new one.

        If a new one has a process, that starts with the first call.

        Args:
            environment: The conversation's environment.
            conversation: A number that no other conversation has: the seed of its environment.
        """
        free = self._free.setdefault(environment, [])
        if conversation in self._waiting:
            return self._waiting.pop(conversation)
        if free:
            return free.pop()
        host = environment.host(self._coroutines)
        if environment.workers is not None:
            self._processes.append(host)
        return host

    def give_back(self, environment: Environment, host: Host) -> None:
        """Keep the host for another conversation, or close it where `workers` hosts are free or it has no process."""
        free = self._free.setdefault(environment, [])
        if environment.workers is not None and len(free) < environment.workers:
            free.append(host)
        else:
            host.close()
            self._processes = [each for each in self._processes if each is not host]

    def keep(self, conversation: int, host: Host) -> None:
        """Keep the host, with its environment, for this conversation, which a later draw continues."""
        self._waiting[conversation] = host

    def waits(self, conversation: int) -> bool:
        """Whether a host with this conversation's environment waits, and has not been taken since."""
        return conversation in self._waiting

    def cancel(self) -> None:
        """Cancel the coroutines that calls wait for."""
        self._coroutines.close()

    def kill(self) -> None:
        """Kill all processes, so that calls in progress end."""
        for host in self._processes:
            if isinstance(host, Worker):
                host.kill()

    def close(self) -> None:
        """End all processes, and the loop of coroutines, on which code may share locks and clients until then."""
        for host in self._processes:
            host.close()
        self._processes.clear()
        self._free.clear()
        self._waiting.clear()
        self._coroutines.close()


def measure_conversations(
    node_id: str,
    conversations: Sequence[Conversation],
    times: ConversationTimes,
    metrics: StepMetrics,
    cut_off: bool = False,
) -> None:
    """Log turns, tool calls, the policy's share of the tokens, time of environments, and why conversations ended.

    Args:
        node_id: Name of the node.
        conversations: This rank's conversations; with `cut_off`, only those that ended in this call are counted.
        times: Times of the conversations.
        metrics: Metrics of the step.
        cut_off: Whether conversations may be cut off and continued.
    """
    if cut_off:
        metrics.sum(f"{node_id}/restarted", float(sum(each.restarted for each in conversations)))
        conversations = [each for each in conversations if each.ended is not None and not each.was_over]
    measure_turns(node_id, conversations, metrics)
    if times.episodes is not None:
        metrics.sum(f"{node_id}/episodes", float(times.episodes.count))
        metrics.sum(f"{node_id}/requests_refused", float(times.episodes.refused))
        metrics.sum(f"{node_id}/undelivered", float(times.episodes.undelivered))
        metrics.sum(f"{node_id}/requests_rewritten", float(times.episodes.rewritten))
    count = float(len(conversations))
    ends = [each.ended for each in conversations]
    written = sum(sum(each.segments[::2]) for each in conversations)  # those that are left out of the loss, too
    metrics.mean(f"{node_id}/written", float(written), float(sum(len(each.tokens) for each in conversations)))
    metrics.mean(f"{node_id}/environment_seconds", times.calls, float(times.count))
    metrics.mean(f"{node_id}/environment_wait", times.idle, times.whole)
    metrics.mean(f"{node_id}/ended_done", float(ends.count(Ending.DONE)), count)
    metrics.mean(f"{node_id}/ended_turns", float(ends.count(Ending.TURNS)), count)
    metrics.mean(f"{node_id}/ended_tokens", float(ends.count(Ending.TOKENS)), count)
    metrics.mean(f"{node_id}/ended_failed", float(ends.count(Ending.FAILED)), count)


def measure_turns(node_id: str, conversations: Sequence[Conversation], metrics: StepMetrics) -> None:
    """Log turns and tool calls of each of this rank's conversations, and which share of the calls failed."""
    count = float(len(conversations))
    calls = float(sum(each.calls for each in conversations))
    metrics.mean(f"{node_id}/turns", float(sum(each.turns for each in conversations)), count)
    metrics.mean(f"{node_id}/tool_calls", calls, count)
    metrics.mean(f"{node_id}/tool_errors", float(sum(each.failed for each in conversations)), calls)
