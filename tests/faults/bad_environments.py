"""Environments with each fault that one may have, chosen by the row. Imported by workers."""

import bad_rewards


class _Misbehaving:
    kind = ""

    def reset(self, bad):
        self.bad = bad

    def initial_observation(self):
        return "go"

    def step(self, message):
        reward = getattr(bad_rewards, self.kind)("x" if self.bad else "", {})
        return {"reward": reward, "episode_done": True, "next_messages": []}


def __getattr__(kind):
    if not hasattr(bad_rewards, kind):
        raise AttributeError(kind)
    return type(kind, (_Misbehaving,), {"kind": kind})
