"""Imported first: ends in one line on a Python that could not even read the other files."""

import sys

MINIMUM = (3, 11)

if sys.version_info[:2] < MINIMUM:
    print(
        "rlflow: error: this is Python {}.{}, and rlflow needs {}.{} or newer; install it, and rlflow into an"
        " environment of it".format(*sys.version_info[:2], *MINIMUM),
        file=sys.stderr,
    )
    raise SystemExit(2)
