#!/usr/bin/env bash
# Fills a folder with all that a bare GPU machine needs to run this checkout: the checkout, wheels, the native libraries as
# they were built here, the kernels' cubins and, if asked for, tritonserver.
#
#     scripts/prepare_gpu_machine.sh FOLDER [--arch sm_90] [--python 3.12] [--triton] [--without_checkout]
#
# Then, on the machine: FOLDER/run.sh faser bench gpu --output_dir gpu_results --minutes 5
#
# The machine needs no network: Linux on x86-64, Python with torch, numpy, transformers (and so tokenizers and
# safetensors), typer and rich, and nvcc of the version here (cubins are kept by content and nvcc's version).
# ./build.sh setup and test have run here. Tracked files travel as they are in the working tree. --without_checkout:
# the checkout gets there by itself, with faser_trtllm/_native and build/cuda; run.sh is then run in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${FASER_VENV:-$PWD/.venv}"
PYTHON="$VENV/bin/python"
MAX_MIB=64
WHEELS=(pydantic pydantic_core annotated-types typing-inspection typing_extensions gguf)
TRITON_WHEELS=(tritonclient protobuf grpcio python-rapidjson)
HEAD_DIMS=(64 128) # of the demo pair and of what the bench makes of it
PLATFORMS=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
LEFT_OUT=(docs/figures docs/observability engines/demo/eagle3)

die() {
  echo "prepare_gpu_machine.sh: $*" >&2
  exit 1
}

folder="" arch=sm_90 python=3.12 triton="" checkout=yes
while [ $# -gt 0 ]; do
  case $1 in
    --arch) arch=${2:?--arch takes one like sm_90} && shift ;;
    --python) python=${2:?--python takes a version like 3.12} && shift ;;
    --triton) triton=yes ;;
    --without_checkout) checkout="" ;;
    -*) die "$1 is unknown; there are --arch, --python, --triton and --without_checkout" ;;
    *) [ -z "$folder" ] && folder=$1 || die "one folder is filled, $folder and $1 were given" ;;
  esac
  shift
done
[ -n "$folder" ] || die "name the folder to fill: scripts/prepare_gpu_machine.sh FOLDER"
[ ! -e "$folder" ] || [ -z "$(ls -A "$folder")" ] || die "$folder is not empty; remove it or name another"
[ -x "$PYTHON" ] || die "$VENV is missing; run ./build.sh setup"
compgen -G 'faser_trtllm/_native/libfaser_cpu.*' >/dev/null || die "faser_trtllm/_native is empty; run ./build.sh setup"
mkdir -p "$folder/whl"
folder=$(cd "$folder" && pwd)

wanted=()
for name in "${WHEELS[@]}" ${triton:+"${TRITON_WHEELS[@]}"}; do
  pin=$(grep -iE "^${name/_/[_-]}==" constraints.txt | cut -d';' -f1 | tr -d ' ' | head -n 1) ||
    die "constraints.txt does not pin $name"
  wanted+=("$pin")
done
"$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$python" \
  --implementation cp "${PLATFORMS[@]/#/--platform=}" --dest "$folder/whl" "${wanted[@]}"

compile() { "$PYTHON" -m faser_trtllm.ops.cuda.compiler --arch "$arch" "$@" >/dev/null; }
stems=()
for file in $(find plugins/cuda -name '*.cu' | sort); do
  stem=$(basename "$file" .cu)
  [ "$stem" = verify_attention ] || stems+=(--stem "$stem")
done
compile "${stems[@]}"
for size in "${HEAD_DIMS[@]}"; do
  compile --stem verify_attention --define "FASER_HEAD_DIM=$size"
done

if [ -n "$checkout" ]; then
  mkdir "$folder/checkout"
  git ls-files -z "${LEFT_OUT[@]/#/:!}" | tar -c --null -T - | tar -x -C "$folder/checkout"
  cp -r faser_trtllm/_native "$folder/checkout/faser_trtllm/"
  mkdir -p "$folder/checkout/build/cuda"
  cp build/cuda/*-"$arch"-*.cubin* "$folder/checkout/build/cuda/"
fi

if [ -n "$triton" ]; then
  site=$("$PYTHON" -c 'import importlib.util as u; found = u.find_spec("pytriton"); print(found.submodule_search_locations[0] if found else "")')
  [ -n "$site" ] || die "nvidia-pytriton, which brings tritonserver, is missing; run ./build.sh setup"
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  mkdir -p "$scratch/pytriton/tritonserver/backends"
  : >"$scratch/pytriton/__init__.py"
  cp -r "$site/tritonserver/bin" "$site/tritonserver/caches" "$scratch/pytriton/tritonserver/"
  cp -r "$site/../nvidia_pytriton.libs" "$scratch/"
  rm -f "$scratch"/nvidia_pytriton.libs/libpython3* # of its Python backend, which ours does not need
  tar -C "$scratch" -cf - . | xz -T0 --x86 --lzma2=preset=9e,dict=128MiB >"$folder/triton.tar.xz"
fi

cat >"$folder/run.sh" <<'R'
#!/usr/bin/env bash
# On the GPU machine: run.sh COMMAND... in the checkout, with everything on the paths.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ ! -d "$here/site" ]; then
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --target "$here/site.part" "$here"/whl/*.whl
  [ ! -f "$here/triton.tar.xz" ] || tar -xf "$here/triton.tar.xz" -C "$here/site.part"
  mv "$here/site.part" "$here/site"
fi
[ ! -d "$here/checkout" ] || cd "$here/checkout"
export PYTHONPATH="$here/site:$PWD" PYTHONUNBUFFERED=1 PATH="$PATH:/usr/local/cuda/bin"
if [ "${1:-}" = faser ]; then # nothing is installed, so there is no such program
  shift
  set -- python3 -m faser_trtllm.cli "$@"
fi
exec "$@"
R
chmod +x "$folder/run.sh"
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
size=$(du -sm --apparent-size "$folder" | cut -f1)
[ "$size" -le "$MAX_MIB" ] || die "$folder has $size MiB, more than $MAX_MIB; leave out --triton, or the checkout with --without_checkout"
echo "prepare_gpu_machine.sh: $folder has $size MiB"
