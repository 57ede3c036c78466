"""Rewards: functions that score a response. Their parameters name the response and columns of the data."""


def exact(response: str, answer: str) -> float:
    """1 for the answer, 0.2 for another number, else 0."""
    said = response.strip()
    return 1.0 if said == answer else 0.2 * said.isdigit()
