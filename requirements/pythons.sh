#!/bin/sh
# Installs a wheel by setup.py's ranges into a new environment of each Python, and tries it away from the checkout: the
# command, SFT and GRPO on two ranks, and the tests that need no more than this.
# Usage: requirements/pythons.sh WHEEL PYTHON...      e.g. requirements/pythons.sh dist/*.whl python3.12 python3.13
# EXTRAS names the extras that are installed.
set -eu
source="$(cd "$(dirname "$0")/.." && pwd)"
wheel="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"
shift
extras=${EXTRAS:-deepspeed,lora,tasks,tensorboard,wandb}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

tried=
for python in "$@"; do
    # Tried by running it: a version manager's `python3.12` may stand for a Python that is not installed.
    if ! version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null); then
        echo "$python: not found, so not tried" >&2
        continue
    fi
    echo "Python $version: installing $(basename "$wheel")[$extras] by ranges" >&2
    "$python" -m venv "$scratch/venv"
    bin="$scratch/venv/bin"
    "$bin/python" -m pip --quiet install "$wheel[$extras]" pytest hypothesis jsonschema
    "$bin/python" -m pip list --format freeze | grep -iE '^(torch|deepspeed|lightning|transformers|numpy|jsonargparse)==' >&2

    mkdir "$scratch/work"
    cp -r "$source/configs" "$source/tests" "$source/algorithms" "$source/pyproject.toml" "$scratch/work"
    cd "$scratch/work"
    "$bin/rlflow" --help >/dev/null
    "$bin/rlflow" fit --config configs/quickstart_sft.yaml --trainer.max_steps 5
    "$bin/rlflow" fit --config configs/quickstart_grpo.yaml --trainer.max_steps 2 \
        --rollout rlflow.rollout.TransformersEngine
    "$bin/python" -m pytest -q --durations 0 tests/dag tests/functional tests/workflow tests/commands/test_configuration.py \
        tests/run/test_memory_table.py tests/test_module.py tests/memory/test_out_of_memory.py tests/run/test_placement.py
    cd "$source"
    rm -rf "$scratch/venv" "$scratch/work"
    tried="$tried $version"
done
[ -n "$tried" ] || { echo "none of these Pythons is there: $*" >&2; exit 2; }
echo "tried on Python$tried" >&2
