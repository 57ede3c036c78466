#!/bin/sh
# Makes a virtual environment from a lock, and only when that lock is not the one it was made from.
# Usage: requirements/install.sh FOLDER [LOCK]        e.g. requirements/install.sh .venv cuda
# LOCK is `cpu` or `cuda`; without it, that of the environment that is there, else `cpu`.
set -eu
cd "$(dirname "$0")/.."
venv=$1
made_from="$venv/made-from.lock"
oldest_driver=580 # that runs CUDA 13, for which requirements/cuda.lock is built

chosen=${2:-}
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
case ${driver%%.*} in '' | *[!0-9]*) driver= ;; esac # no GPU, or what nvidia-smi says where there is none
if [ -z "$chosen" ]; then
    chosen=cpu
    if [ -f "$made_from" ] && grep -q '^vllm==' "$made_from"; then chosen=cuda; fi
    if [ "$chosen" = cpu ] && [ -n "$driver" ] && [ ! -f "$made_from" ]; then
        echo "This machine has a GPU, which the CPU's environment does not use; for one that does: make setup LOCK=cuda" >&2
    fi
fi
lock="requirements/$chosen.lock"
if [ ! -f "$lock" ]; then
    echo "LOCK is '$chosen', and there is no $lock; choose cpu or cuda" >&2
    exit 2
fi
if [ "$chosen" = cuda ] && [ -n "$driver" ] && [ "${driver%%.*}" -lt "$oldest_driver" ]; then
    echo "The NVIDIA driver of this machine is $driver, and $lock is for CUDA 13, which needs $oldest_driver or newer; install a newer driver, or choose the CPU: make setup LOCK=cpu" >&2
    exit 2
fi

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

# In a terminal pip and uv show how far they are, and the time left of a download; elsewhere only errors are printed.
quiet=--quiet
if [ -t 1 ] && [ -t 2 ]; then quiet=; fi
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip $quiet $quiet "$@"; }

if ! cmp -s "$lock" "$made_from"; then
    echo "Installing $lock into $venv: 4 GB for the CPU, 9 for CUDA; a few minutes, less with uv" >&2
    "$python" -m venv --clear "$venv"
    # The CPU build of torch is on no main index. pip is asked plainly first, since it may be set up to find it; an
    # index given for every package would be asked for every package. `===` takes no build but the one named: where pip
    # finds the CPU's too, 2.13.0+cpu would do for torch==2.13.0.
    torch=$(sed -n 's/^torch==/torch===/p' "$lock")
    if ! pip install --no-deps "$torch" 2> "$venv/plainly.log"; then
        pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" || {
            cat "$venv/plainly.log" >&2
            exit 1
        }
    fi
    rm -f "$venv/plainly.log"
    # uv takes seconds where pip takes minutes; where it is not set up to find what pip finds, pip does it.
    uv=$(command -v "${UV:-uv}" || true)
    if [ -z "$uv" ] || ! "$uv" pip install $quiet --compile-bytecode --python "$venv/bin/python" --no-deps -r "$lock"; then
        pip install --no-deps -r "$lock"
    fi
    cp "$lock" "$made_from"
fi

# The package itself is linked, not copied; linked anew when its packaging changes.
if ! cmp -s setup.py "$venv/made-from.setup.py"; then
    pip install --no-deps --no-build-isolation -e .
    cp setup.py "$venv/made-from.setup.py"
fi
