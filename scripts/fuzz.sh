#!/usr/bin/env bash
# Fuzzes the parsers with atheris, targets side by side: scripts/fuzz.sh [--minutes N] [--target T]... [--jobs N] [--work_dir DIR]
# Corpora grow in DIR (default: build/fuzz). Ends with runs, CPU minutes and findings of each target, and the lines of each parser that
# were run; status 1 with findings. docs/verify.md has more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${FASER_VENV:-$PWD/.venv}/bin/python"
minutes=1 jobs=$(nproc) work_dir=build/fuzz targets=()
while [ $# -gt 0 ]; do
  case "$1" in
    --minutes) minutes=$2 ;;
    --target) targets+=("$2") ;;
    --jobs) jobs=$2 ;;
    --work_dir) work_dir=$2 ;;
    *)
      echo "usage: scripts/fuzz.sh [--minutes N] [--target T]... [--jobs N] [--work_dir DIR]" >&2
      exit 2
      ;;
  esac
  shift 2
done
"$PYTHON" -c 'import atheris, coverage' 2>/dev/null || {
  echo "fuzz.sh: atheris or coverage is not installed; run $PYTHON -m pip install -c constraints.txt -e .[fuzz] (Python 3.11 or newer)" >&2
  exit 1
}
if [ ${#targets[@]} -eq 0 ]; then
  read -ra targets <<<"$("$PYTHON" -c 'from tests.fuzz.targets import TARGETS; print(*TARGETS)')"
fi
mkdir -p "$work_dir"
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 RUST_BACKTRACE=0
seconds=$(awk "BEGIN { print int(60 * $minutes) }")
printf '%s\n' "${targets[@]}" | xargs -P "$jobs" -I{} sh -c \
  "$PYTHON -m tests.fuzz {} --seconds $seconds --work_dir '$work_dir' >'$work_dir/{}.log' 2>&1 || echo 'fuzz.sh: {} ended with an error, see $work_dir/{}.log' >&2"
exec "$PYTHON" -m tests.fuzz.report --work_dir "$work_dir" $(printf -- '--target %s ' "${targets[@]}")
