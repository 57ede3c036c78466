"""`EnvironmentHosts`: where the environments of a rank's conversations run, free or kept for one of them."""

from __future__ import annotations

from rlflow.environments.environment import Environment
from rlflow.environments.host import Coroutines, Host


class EnvironmentHosts:
    """Hosts of environments; processes are kept for later conversations, until `close`."""

    def __init__(self) -> None:
        self._coroutines = Coroutines()
        self._free: dict[Environment, list[Host]] = {}
        self._waiting: dict[int, Host] = {}
        self._processes: list[Host] = []

    def take(self, environment: Environment, conversation: int) -> Host:
        """A host for a conversation: the one that waits for it, or one that is free.

        Args:
            environment: Of the conversation.
            conversation: A number that no other one has.
        """
        free = self._free.setdefault(environment, [])
        if conversation in self._waiting:
            return self._waiting.pop(conversation)
        return free.pop() if free else self.made(environment)

    def give_back(self, environment: Environment, host: Host) -> None:
        """It is free for another conversation, or ends where as many are as may run side by side."""
        free = self._free.setdefault(environment, [])
        if environment.workers is not None and len(free) < environment.workers:
            free.append(host)
        else:
            host.close()
            self._processes = [each for each in self._processes if each is not host]

    def keep(self, conversation: int, host: Host) -> None:
        """It waits, with its environment, until its conversation is continued."""
        self._waiting[conversation] = host

    def waits(self, conversation: int) -> bool:
        """Whether the environment of this conversation is still there."""
        return conversation in self._waiting

    def made(self, environment: Environment) -> Host:
        """A new one; a process starts with its first call."""
        host = environment.host(self._coroutines)
        if environment.workers is not None:
            self._processes.append(host)
        return host

    def cancel(self) -> None:
        """Cancel the coroutines that calls wait for."""
        self._coroutines.close()

    def pause(self) -> None:
        """End the loop of coroutines, unless an environment waits that may have something on it."""
        if not self._waiting:
            self._coroutines.close()

    def close(self) -> None:
        """End all processes."""
        for host in self._processes:
            host.close()
        self._processes.clear()
        self._free.clear()
        self._waiting.clear()
        self._coroutines.close()
