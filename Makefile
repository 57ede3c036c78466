# The commands of rlflow; `make` alone lists them. Locked and tested on Linux x86-64 with Python 3.11.
VENV ?= .venv
# What the environment is made from: `cpu` or `cuda`; empty for what it is already, else the CPU's.
LOCK ?=
RUN := $(VENV)/bin
UV ?= uv
# Where `make lock` finds the CPU build of torch.
TORCH_CPU ?= --torch-backend cpu
UV_FLAGS ?=
# What `make pythons` tries.
PYTHONS ?= python3.12 python3.13
# More arguments for both stages of a quickstart, such as STAGES="--trainer.max_steps 20".
STAGES ?=
# The rows of the table of faults that `make test-all` and `make faults` run, by parts of their names, such as ROW="bad data,leaks".
ROW ?=
# Which of their tests it runs, such as PART=1/2 and then PART=2/2, where all of them take too long for one call.
PART ?=
# More arguments for `make learn`, such as LEARN="--only learn/ppo --jobs 2".
LEARN ?=
# What `make audit` calls: `uvx pip-audit` where uv is and pip-audit is not.
PIP_AUDIT ?= pip-audit
COMPILE := $(UV) pip compile --quiet $(UV_FLAGS) --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--override requirements/overrides.txt --custom-compile-command "make lock"

.DEFAULT_GOAL := help
.PHONY: help setup quickstart quickstart-agent learn test test-all faults check lint docs lock door-envs audit cuda-env wheel pythons clean

help: ## List the commands
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

setup: ## Make .venv from a lock, if it is not made from it already: LOCK=cuda for GPUs, else the CPU's
	@requirements/install.sh $(VENV) $(LOCK)

quickstart: setup ## Train a small language model with SFT, then with GRPO on two ranks
	$(RUN)/rlflow fit --config configs/quickstart_sft.yaml $(STAGES)
	$(RUN)/rlflow fit --config configs/quickstart_grpo.yaml $(STAGES)

quickstart-agent: setup ## Train a small agent to call a tool, with SFT and then with GRPO, in under three minutes
	$(RUN)/rlflow fit --config configs/quickstart_agent_sft.yaml $(STAGES)
	$(RUN)/rlflow fit --config configs/quickstart_agent_grpo.yaml $(STAGES)

learn: setup ## Train every algorithm with three seeds and check what they learn; a finished training is not run again
	$(RUN)/python -m benchmarks.learning $(LEARN)

test: setup ## Run the tests but those of `make test-all`, in minutes
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN)/python -m pytest -n 2 --dist worksteal

test-all: setup ## Run what `make test` leaves out, in hours; what passed on this code is not run again: ROW="bad data" PART=1/6
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest $(TESTS) -m "slow or row" --rows "$(ROW)" --part "$(PART)"

faults: TESTS := tests/faults
faults: test-all ## Try every fault and print the table of what holds, which `make test-all` does too: ROW="bad data" PART=1/2

check: lint docs test ## Run what CI runs

lint: setup ## Check style, types, imports and spelling
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/lint-imports --no-logo
	$(RUN)/codespell

docs: setup ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

lock: ## Resolve requirements/*.in into requirements/*.lock (needs uv)
	$(COMPILE) $(TORCH_CPU) requirements/cpu.in --override requirements/overrides_cpu.txt -o requirements/cpu.lock
	$(COMPILE) requirements/cuda.in -o requirements/cuda.lock

door-envs: ## Make an environment in build/door for each requirements/door-*.txt: agents whose libraries are not in ours
	@for each in $(patsubst requirements/door-%.txt,%,$(wildcard requirements/door-*.txt)); do \
		$(RUN)/python -m venv build/door/$$each && \
		build/door/$$each/bin/python -m pip install --quiet -r requirements/door-$$each.txt || exit 1; \
	done

audit: ## Look up known vulnerabilities of the locked versions (needs pip-audit and the network)
	@command -v $(firstword $(PIP_AUDIT)) >/dev/null || { echo "there is no $(firstword $(PIP_AUDIT)) here: pipx install pip-audit, or make audit PIP_AUDIT='uvx pip-audit'" >&2; exit 2; }
	@mkdir -p build
	@found=0; for lock in cpu cuda; do \
		sed 's/+cpu$$//' requirements/$$lock.lock > build/audit-$$lock.txt && \
		$(PIP_AUDIT) --strict --disable-pip --no-deps -r build/audit-$$lock.txt || found=1; \
	done; exit $$found

cuda-env: ## Install the lock for GPUs beside, on any machine, and check what can be checked without a GPU (maintainers)
	@requirements/install.sh .venv-cuda cuda
	.venv-cuda/bin/python requirements/check_cuda_env.py

wheel: setup ## Build the wheel into dist/
	$(RUN)/python -m build --wheel

pythons: wheel ## Try the wheel on other Pythons, installed by ranges: PYTHONS="python3.12 /path/to/python3.13"
	requirements/pythons.sh dist/rlflow_llm-*.whl $(PYTHONS)

clean: ## Remove what the commands made, runs/ aside
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
