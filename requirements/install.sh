#!/bin/sh
# Makes a virtual environment from a lock, and only when that lock is not the one it was made from.
# Usage: requirements/install.sh FOLDER        e.g. requirements/install.sh .venv
set -eu
cd "$(dirname "$0")/.."
venv=$1

system="$(uname -s) $(uname -m)"
if [ "$system" != "Linux x86_64" ]; then
    echo "rlflow is locked and tested on Linux x86-64 with Python 3.11; this is $system. The part that runs here (one process, transformers' rollout engine): python3 -m venv $venv && $venv/bin/pip install -e '.[tasks]'" >&2
    exit 2
fi

# Tried by running them: a version manager's `python3.11` may stand for a Python that is not installed.
for python in ${PYTHON:-python3.11 python3 python}; do
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && break || python=
done
if [ -z "$python" ]; then
    echo "rlflow is locked and tested with Python 3.11, and none was found; install it, or name it: make PYTHON=/path/to/python3.11" >&2
    exit 2
fi

if nvidia-smi -L >/dev/null 2>&1; then lock=requirements/cuda.lock; else lock=requirements/cpu.lock; fi
made_from="$venv/made-from.lock"
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip --quiet --quiet "$@"; } # errors only

if ! cmp -s "$lock" "$made_from"; then
    echo "Installing $lock into $venv: about 4 GB, a few minutes" >&2
    "$python" -m venv --clear "$venv"
    # The CPU build of torch is on no main index. pip is asked plainly first, since it may be set up to find it; an
    # index given for every package would be asked for every package.
    torch=$(grep '^torch==' "$lock")
    if ! plainly=$(pip install --no-deps "$torch" 2>&1); then
        pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" || {
            echo "$plainly" >&2
            exit 1
        }
    fi
    pip install --no-deps -r "$lock"
    cp "$lock" "$made_from"
fi

# The package itself is linked, not copied; linked anew when its packaging changes.
if ! cmp -s setup.py "$venv/made-from.setup.py"; then
    pip install --no-deps --no-build-isolation -e .
    cp setup.py "$venv/made-from.setup.py"
fi
