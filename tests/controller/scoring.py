"""Rewards that take their time, differently for each row. Workers import it."""

import os
import time

STEP_S = 0.004


def delay(question: str) -> float:
    """Seconds: the first rows take longest, so that scores do not come in the order of rows."""
    return STEP_S * (7 - int(question.partition("+")[0]) % 8)


def odd(response: str, question: str) -> float:
    """A score of as many points as the response has characters of odd code."""
    time.sleep(delay(question))
    return float(sum(ord(character) % 2 for character in response))


def fails_on_some(response: str, question: str) -> float:
    """The same, and fails on about a third of the responses."""
    if sum(map(ord, response)) % 3 == 0:
        time.sleep(delay(question))
        raise ValueError(f"cannot score {len(response)} characters")
    return odd(response, question)


def exits_on_some(response: str, question: str) -> float:
    """The same, and ends its process instead."""
    if sum(map(ord, response)) % 3 == 0:
        os._exit(3)
    return odd(response, question)


def of_conversation(messages: list, question: str) -> float:
    """The length of what was said, and of each message's number of keys."""
    time.sleep(delay(question))
    return sum(len(each["content"]) / 100 + len(each) for each in messages)


def all_together(completions: list, question: list, **columns: list) -> list:
    """TRL's form: the best of all responses has one point."""
    return [float(len(each) == max(map(len, completions))) for each in completions]
