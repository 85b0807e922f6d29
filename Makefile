# Everything a visitor or a CI machine does. Needs GNU make and Python 3.11 or newer with pip; the rest is installed into .venv.
#
#   make demo     train a language model with a syncer and three learners on this machine, losing one of them on the way; with
#                 ARGS="--store bucket" the syncer of two, over a bucket of this machine; with ARGS=--rl reinforcement learning
#   make test     the tests that a change needs, in four processes
#   make test-all all tests; with ARGS=--cov, which lines and branches they run
#   make arithmetic   what must hold to the bit, computed by compiled loops whatever the size: the contracts of tests/core, torchft, trajectories
#   make lint     ruff, mypy, import directions
#   make package  build sdist and wheel, and try the wheel where nothing else is installed
#   make sky      check templates/skypilot with SkyPilot itself, in an environment of its own
#   make torchtitan   the tests of examples/integrations/torchtitan and of the Triton kernels, in an environment of their own
#   make trackers     trackio and MLflow as trackers of a run, in an environment of their own
#   make fuzz     every reader given inputs that are almost right, SECONDS=60 for each, or of TARGET=run-file,events only
#   make chaos    a real run under faults, MINUTES=1 of SEED=0 with LEARNERS=3, or FAULTS="cut,kill syncer" only: what must hold
#   make soak     a long one, HOURS=1 of it: fails on a leak, a stuck fragment, a ledger that does not add up
#   make storm    whole runs in virtual time in which all goes wrong that can, SEEDS=1-1000
#   make docs     the site of docs/, into site/; make docs-serve shows it on a loopback port and follows changes
#   make bench    what exchanging costs, as ratios measured in the same run
#   make gpu      check and measure the CUDA path on the GPU that is here; exit code 2 where there is none
#   make proto    the messages of the wire, from their .proto file
#   make clean    remove what make created, .venv included
#
# Variables:
#   PYTHON=python3.12     the interpreter that .venv is made from (default: the first suitable one)
#   PIP_ARGS=...          further arguments for pip install. On Linux the default torch comes with its CUDA libraries (several
#                         GB); without an NVIDIA GPU, choose an index that serves CPU builds here: PIP_ARGS="--index-url URL"
#   ARGS=...              further arguments for the command itself: make demo ARGS=--quick, make test ARGS="-k codecs", and for one
#                         process that a debugger can stop, make test ARGS="-n 0"

SEEDS ?= 1-1000
SECONDS ?= 60
SEED ?= 0
MINUTES ?= 1
LEARNERS ?= 3
HOURS ?= 1
VENV := .venv
BIN := $(VENV)/bin
# Stamps: the demo needs less than the tests, and more for a bucket or for reinforcement learning. What is installed for the tests serves the demo; a demo's .venv is completed.
MADE := $(VENV)/.made
FOR_DEMO := $(VENV)/.installed-for-demo
FOR_BUCKET := $(VENV)/.installed-for-demo-bucket
FOR_RL := $(VENV)/.installed-for-demo-rl
FOR_ALL := $(VENV)/.installed

# Runs where the version is right, venv is complete or pip is at hand. Names that are mere shims fail here and are passed over.
SUITABLE := import sys, venv, importlib.util as u; sys.exit(sys.version_info < (3, 11) or not (u.find_spec("ensurepip") or u.find_spec("pip")))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	"$$python" -c '$(SUITABLE)' >/dev/null 2>&1 && { echo "$$python"; break; }; done)

# A file's tests share their processes and stay together; tests/conftest.py begins with those that take longest. Tests wait for deadlines
# and processes, so four of them keep two cores busy. The processes that tests start keep compiled modules,
# whatever the caller's environment says.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: all demo test test-all arithmetic lint package sky torchtitan trackers docs docs-serve fuzz chaos soak storm bench gpu proto venv clean
.DELETE_ON_ERROR:

all: lint test

demo: $(if $(findstring bucket,$(ARGS)),$(FOR_BUCKET),$(if $(findstring --rl,$(ARGS)),$(FOR_RL),$(FOR_DEMO)))
	$(BIN)/diloco demo $(ARGS)

test: $(FOR_ALL)
	$(PYTEST) $(ARGS)

package: $(FOR_ALL)
	$(BIN)/python .ci/package.py

test-all: $(FOR_ALL)
	$(PYTEST) -m "" $(ARGS)

arithmetic: $(FOR_ALL)
	$(PYTEST) --arithmetic compiled tests/core tests/test_torchft.py tests/test_family.py tests/test_identities.py $(ARGS)

lint: $(FOR_ALL)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

SKY := .venv-sky
$(SKY)/.installed: tests/templates/skypilot-constraints.txt | $(MADE)
	@if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then "$(PYTHON)" -m venv $(SKY); \
	else "$(PYTHON)" -m venv --without-pip $(SKY); fi
	@$(BIN)/python -m pip --python $(SKY)/bin/python install --quiet --no-compile $(PIP_ARGS) -c $< skypilot
	@touch $@

sky: $(SKY)/.installed
	$(SKY)/bin/python tests/templates/check_skypilot.py

# torchtitan needs an older datasets than the rest, and triton, which it imports on CPUs too.
TITAN := .venv-torchtitan
$(TITAN)/.installed: tests/integrations/torchtitan-constraints.txt pyproject.toml | $(MADE)
	@if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then "$(PYTHON)" -m venv $(TITAN); \
	else "$(PYTHON)" -m venv --without-pip $(TITAN); fi
	$(BIN)/python -m pip --python $(TITAN)/bin/python install --quiet $(PIP_ARGS) -c $< \
		torch triton hypothesis pytest pytest-timeout -e ".[torchtitan]"
	@touch $@

torchtitan: $(TITAN)/.installed
	$(TITAN)/bin/python -m pytest -k torchtitan tests/integrations/test_torchtitan.py tests/integrations/test_stacks.py $(ARGS)
	$(TITAN)/bin/python -m pytest tests/core/test_codecs_triton.py

# mlflow and trackio need older pyarrow and pillow than the rest. Trackers reach no torch.
TRACKERS := .venv-trackers
$(TRACKERS)/.installed: tests/tracking/constraints.txt | $(MADE)
	@if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then "$(PYTHON)" -m venv $(TRACKERS); \
	else "$(PYTHON)" -m venv --without-pip $(TRACKERS); fi
	@$(BIN)/python -m pip --python $(TRACKERS)/bin/python install --quiet --no-compile $(PIP_ARGS) -c $< \
		mlflow trackio pydantic pytest pytest-timeout
	@touch $@

trackers: $(TRACKERS)/.installed
	PYTHONPATH=src $(TRACKERS)/bin/python -m pytest --confcutdir=tests/tracking tests/tracking/test_trackers.py $(ARGS)

# In the environment of the tests: the site's reference is that of the package as it is installed there.
$(VENV)/.installed-for-docs: $(FOR_ALL)
	@$(INSTALL) -e ".[docs]"
	@touch $@

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(VENV)/.installed-for-docs
	$(MKDOCS) build --strict $(ARGS)

docs-serve: $(VENV)/.installed-for-docs
	$(MKDOCS) serve $(ARGS)

# What guides the inputs by what they cover, in the environment of the tests.
$(VENV)/.installed-for-fuzz: $(FOR_ALL)
	@$(INSTALL) -c tests/fuzz/constraints.txt -e ".[fuzz]"
	@touch $@

fuzz: $(VENV)/.installed-for-fuzz
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(TARGET),--target $(TARGET)) $(ARGS)

CHAOS := $(BIN)/python -m tests.chaos --seed $(SEED) --learners $(LEARNERS)
chaos: $(FOR_ALL)
	$(CHAOS) --minutes $(MINUTES) $(if $(FAULTS),--only "$(FAULTS)") $(ARGS)

soak: $(FOR_ALL)
	$(CHAOS) --soak --hours $(HOURS) --out runs/soak $(ARGS)

storm: $(FOR_ALL)
	$(BIN)/python -m tests.storms $(SEEDS)

bench: $(FOR_ALL)
	$(BIN)/python -m benchmarks $(ARGS)

gpu: $(FOR_ALL)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

proto: $(FOR_ALL)
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src diloco/exchange/wire/syncer.proto

venv: $(FOR_ALL)

# The constraints hold for torch too, so that no other torch is ever resolved. Where Python comes without ensurepip (Debian keeps it
# in a package of its own), pip is installed by the pip that is there. Modules are compiled afterwards: all of them on all cores, or
# for the demo those that its processes import.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # a few packages ship files that are no Python
DEMO_IMPORTS := diloco.demo.display, diloco.evaluation.evaluate, diloco.training.loop, diloco.syncer.server, torch._dynamo, \
	transformers.models.llama.modeling_llama

$(MADE):
	@test -n "$(PYTHON)" || { echo "diloco: found no Python 3.11 or newer with venv and pip; install one, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c '$(SUITABLE)' 2>/dev/null || { echo "diloco: $(PYTHON) is not Python 3.11 or newer with venv and pip; name another with make PYTHON=/path/to/python3" >&2; exit 1; }
	@if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then "$(PYTHON)" -m venv $(VENV); \
	else "$(PYTHON)" -m venv --without-pip $(VENV) && "$(PYTHON)" -m pip --python $(BIN)/python install --quiet pip; fi
	@touch $@

$(FOR_DEMO): constraints.txt pyproject.toml setup.py | $(MADE)
	@echo "installing what the demo needs into $(VENV), once; this takes some minutes"
	@$(INSTALL) torch -e ".[demo]"
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "import $(DEMO_IMPORTS)"
	@touch $@

$(FOR_BUCKET): $(FOR_DEMO)
	@$(INSTALL) -e ".[demo-bucket]"
	@touch $@

$(FOR_RL): $(FOR_DEMO)
	@$(INSTALL) -e ".[rl]"
	@touch $@

$(FOR_ALL): constraints.txt pyproject.toml setup.py | $(MADE)
	@echo "installing what the tests need into $(VENV), once; this takes some minutes"
	@$(INSTALL) torch -e ".[train,dashboard,dev]"
	@$(COMPILE)
	@touch $(FOR_DEMO) $(FOR_BUCKET) $(FOR_RL) $@

clean:
	rm -rf $(VENV) $(SKY) $(TITAN) $(TRACKERS) build dist site src/*.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .fuzz
