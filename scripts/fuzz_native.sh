#!/usr/bin/env bash
# Fuzzes the native code, a minute for each target, or as long as SECONDS says: scripts/fuzz_native.sh [SECONDS [TARGET...]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds="${1:-60}"
[ $# -eq 0 ] || shift
exec "${FASER_VENV:-.venv}/bin/python" -m tests.native.fuzz --seconds "$seconds" --work_dir build/fuzz_native "$@"
