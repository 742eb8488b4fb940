#!/usr/bin/env bash
# Pins the images of deploy/ by the digests that their registries have for their tags now: scripts/pin_image.sh [--check]
# --check writes nothing and exits with 1 if a file has another digest, or none. Needs docker with buildx, and the network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FILES=(deploy/Dockerfile deploy/compose.yaml deploy/kubernetes/deployment.yaml)
OURS=faser-trtllm
status=0

for image in $(grep -ohE '(image: |TRITON_IMAGE=)[^ ]+' "${FILES[@]}" | sed -E 's/^(image: |TRITON_IMAGE=)//' | LC_ALL=C sort -u); do
  name="${image%@*}" # with its tag
  [ "${name%%:*}" != "$OURS" ] || continue
  digest=$(docker buildx imagetools inspect "$name" --format '{{.Manifest.Digest}}')
  [[ "$digest" =~ ^sha256:[0-9a-f]{64}$ ]] || {
    echo "pin_image.sh: the registry has no digest for $name: '$digest'" >&2
    exit 1
  }
  [ "$image" != "$name@$digest" ] || continue
  if [ "${1:-}" = --check ]; then
    echo "pin_image.sh: $image should be $name@$digest; run scripts/pin_image.sh" >&2
    status=1
  else
    sed -i -E "s|(image: \|TRITON_IMAGE=)$image\$|\1$name@$digest|" "${FILES[@]}"
    echo "$name@$digest"
  fi
done
exit "$status"
