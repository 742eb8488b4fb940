#!/usr/bin/env bash
# Writes locks/: every package that is installed, with the sha256 of each of its files. Versions are those of constraints.txt;
# what it does not name keeps its version unless it no longer fits. Needs uv (python -m pip install uv==0.13.9).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV="${UV:-uv}"
command -v "$UV" >/dev/null 2>&1 || {
  echo "write_locks.sh: no uv found; run python -m pip install uv==0.13.9, or name it in UV" >&2
  exit 1
}
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT

# lock NAME PACKAGES ARGUMENT...: Linux and the supported Pythons, by [tool.uv] in pyproject.toml
lock() {
  local output="locks/$1.txt"
  tr ' ' '\n' <<<"$2" >"$wanted"
  "$UV" pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header \
    --constraint constraints.txt --output-file "$output" "$wanted" "${@:3}"
}

lock build "scikit-build-core cmake ninja"
lock runtime "" pyproject.toml --extra serve --extra openai --extra observability --extra guided
lock tests "torch aiohttp msgspec pyzmq uvloop" pyproject.toml --extra serve --extra openai --extra test \
  --extra docs --extra tensorrt-rtx --extra cuda
# Installed without their dependencies.
lock server "nvidia-pytriton" --no-deps
lock dynamo "ai-dynamo;python_version>='3.11' ai-dynamo-runtime;python_version>='3.11'" --no-deps
