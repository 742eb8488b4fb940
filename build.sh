#!/usr/bin/env bash
# One entry point: ./build.sh setup | demo | test | lint | docs | sanitize | clean. Idempotent; everything lives in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

VENV="${FASER_VENV:-$PWD/.venv}"
PYTHON="$VENV/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

die() {
  echo "build.sh: $*" >&2
  exit 1
}

usage() {
  cat <<'TEXT'
usage: ./build.sh COMMAND
  setup     make .venv, compile the native library, install the package: a minute and 0.4 GB (needs Python 3.10 to 3.12
            and a C++17 compiler)
  demo      serve the bundled toy pair behind a real Triton server and stream text through tritonclient: a minute after
            setup, and 0.2 GB of engines
  test      lint, type checks and the tests, on all cores (takes pytest's arguments): 4 minutes on two cores, after 3 GB
            of packages, most of it torch and TensorRT;
            --all repeats every property, architecture and instruction set in full, as CI does
  lint      ruff, mypy and clang-format only
  docs      build the documentation's site into build/docs; a warning is an error (needs Python 3.11 or newer)
  sanitize  tests that reach native code, with it compiled by gcc for AddressSanitizer and UBSan (takes pytest's arguments)
  clean     remove .venv and what was built
TEXT
}

find_python() {
  local candidate
  for candidate in ${FASER_PYTHON:-} python3 python3.11 python3.12 python3.10; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.10 to 3.12 with venv found; install one (Debian: apt-get install python3 python3-venv) or set FASER_PYTHON"
}

check_compiler() {
  local compiler="${CXX:-c++}"
  command -v "$compiler" >/dev/null 2>&1 ||
    die "no C++ compiler ($compiler) found; install one (Debian: apt-get install g++) or set CXX"
}

# stamp NAME FILE...: true if the named step has run on exactly these files
stamp_of() { cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1; }
is_done() { [ -f "$VENV/.faser-$1" ] && [ "$(cat "$VENV/.faser-$1")" = "$2" ]; }
mark_done() { echo "$2" >"$VENV/.faser-$1"; }

# False after `pip install '.[...]'` without -e, which puts a copy of the package in the place of this checkout.
is_this_checkout() {
  [ "$("$PYTHON" -Ic 'import faser_trtllm; print(faser_trtllm.__file__)' 2>/dev/null)" = "$PWD/faser_trtllm/__init__.py" ]
}

pip_install() { "$PYTHON" -m pip install --quiet -c constraints.txt "$@"; }

# With FASER_REQUIRE_HASHES=1, as in CI on GitHub, what is installed is checked by the hashes of locks/. Not by default:
# an index of one's own may have other builds of the same versions.
pip_install_locked() { "$PYTHON" -m pip install --quiet --require-hashes -r "locks/$1.txt" "${@:2}"; }

setup() {
  if [ ! -x "$PYTHON" ]; then
    local base
    base=$(find_python)
    echo "build.sh: making $(basename "$VENV") with $("$base" --version)"
    "$base" -m venv "$VENV"
  fi
  local sources
  sources=$(stamp_of pyproject.toml constraints.txt plugins/CMakeLists.txt $(find plugins/cpu plugins/triton -type f | LC_ALL=C sort))
  if ! is_done setup "$sources" || ! compgen -G 'faser_trtllm/_native/libfaser_cpu.*' >/dev/null || ! is_this_checkout; then
    check_compiler
    echo "build.sh: installing the package and compiling the native library"
    if [ -n "${FASER_REQUIRE_HASHES:-}" ]; then
      pip_install_locked build
      pip_install_locked runtime
      pip_install_locked server --no-deps
      pip_install --no-deps --no-build-isolation -e .
    else
      pip_install -e ".[serve,openai]"
      pip_install --no-deps nvidia-pytriton
    fi
    mark_done setup "$sources"
  fi
}

install_dynamo() {
  if [ -n "${FASER_REQUIRE_HASHES:-}" ]; then
    pip_install_locked dynamo --no-deps # locks/tests.txt has what it needs
  else
    pip_install --no-deps ai-dynamo ai-dynamo-runtime && pip_install aiohttp msgspec pyzmq uvloop
  fi
}

setup_tests() {
  setup
  local wanted
  wanted=$(stamp_of pyproject.toml constraints.txt)
  if ! is_done tests "$wanted"; then
    echo "build.sh: installing what the tests need"
    if [ -n "${FASER_REQUIRE_HASHES:-}" ]; then
      pip_install_locked tests
    else
      pip_install torch
      pip_install -e ".[serve,openai,test,docs,tensorrt-rtx,cuda]"
    fi
    # Without their dependencies, as docs/integrations.md describes; quietly, since pip lists those that are missing.
    if ! install_dynamo 2>/dev/null; then
      echo "build.sh: note: NVIDIA Dynamo does not install here; its tests run on a recording of its interface" >&2
    fi
    if "$PYTHON" -m pip list 2>/dev/null | grep -qE '^nvidia-(cublas|cudnn|nccl)'; then
      echo "build.sh: note: this index has only a CUDA build of torch; the tests run on the CPU all the same" >&2
    fi
    mark_done tests "$wanted"
  fi
}

check_style() {
  "$PYTHON" -m ruff check .
  "$PYTHON" -m ruff format --check .
  local sources
  sources=$(git ls-files 'plugins/*.cpp' 'plugins/*.h' 'plugins/*.inl' 'plugins/*.cu' 'plugins/*.cuh' \
    'tests/native/*.cpp' 'tests/native/*.h' 2>/dev/null ||
    find plugins tests/native -name '*.cpp' -o -name '*.h' -o -name '*.inl')
  # shellcheck disable=SC2086
  "$VENV/bin/clang-format" --dry-run --Werror $sources
}

check_types() { "$PYTHON" -m mypy; }

# Style first, since it takes seconds; types run next to the tests. One worker more than cores, as tests wait for servers; each
# takes whole files, whose tests share their servers and engines.
run_tests() {
  local argument arguments=() workers status=0 report
  for argument in "$@"; do
    if [ "$argument" = --all ]; then
      export FASER_TEST_ALL=1
      arguments+=(-ra) # with the reasons of what is skipped
    else
      arguments+=("$argument")
    fi
  done
  check_style
  unset PYTHONDONTWRITEBYTECODE  # as some images set it: every worker would compile every test, in every run
  report=$(mktemp)
  # shellcheck disable=SC2064
  trap "rm -f '$report'" EXIT
  check_types >"$report" 2>&1 &
  local types=$!
  workers=$(($(nproc) + 1))
  "$PYTHON" -m pytest -n "$((workers < 12 ? workers : 12))" --dist loadfile --no-loadscope-reorder \
    ${arguments[@]+"${arguments[@]}"} || status=$?
  wait "$types" || {
    cat "$report" >&2
    die "the types do not fit (mypy, above)"
  }
  return "$status"
}

build_docs() {
  setup
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "the site needs Python 3.11 or 3.12; remove $(basename "$VENV") and set FASER_PYTHON"
  if ! "$PYTHON" -c 'import furo, myst_parser, sphinx' 2>/dev/null; then
    echo "build.sh: installing what the site needs"
    if [ -n "${FASER_REQUIRE_HASHES:-}" ]; then pip_install_locked tests; else pip_install furo myst-parser sphinx; fi
  fi
  "$PYTHON" -m sphinx -W --keep-going -q -b html docs build/docs
  echo "build.sh: the site is at build/docs/index.html"
}

# The sanitized library takes the usual one's place until the tests have ended.
sanitize() {
  local found
  trap 'pip_install -e ".[serve,openai]" --config-settings=cmake.define.FASER_SANITIZE=' EXIT
  pip_install -e ".[serve,openai]" --config-settings=cmake.define.FASER_SANITIZE=address,undefined
  found="$("${CXX:-c++}" -print-file-name=libasan.so) $("${CXX:-c++}" -print-file-name=libubsan.so)"
  LD_PRELOAD="$found" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1 \
    "$PYTHON" -m pytest "$@"
}

case "${1:-}" in
  setup) setup ;;
  demo)
    setup
    shift
    exec "$PYTHON" examples/demo.py "$@"
    ;;
  test)
    setup_tests
    shift
    run_tests "$@"
    ;;
  lint)
    setup_tests
    check_style
    check_types
    ;;
  docs) build_docs ;;
  sanitize)
    setup_tests
    shift
    [ $# -gt 0 ] || set -- --ignore tests/ops/cuda tests/ops tests/sampling tests/engine/cpu tests/executor tests/partition
    sanitize "$@"
    ;;
  clean) rm -rf "$VENV" build faser_trtllm/_native engines/built .pytest_cache .mypy_cache .ruff_cache ;;
  *)
    usage
    [ -z "${1:-}" ] || [ "${1:-}" = help ] || [ "${1:-}" = --help ] || exit 2
    ;;
esac
