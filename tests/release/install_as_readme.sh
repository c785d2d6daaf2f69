#!/bin/bash
# Runs the lines below "## Install" in README.md in the environment whose `python` is on the path, then every example on two
# processes for a few epochs. No torch but the one of the first line may be installed on the way.
set -euo pipefail
cd "$(dirname "$0")/../.."
lines=$(awk '/^## Install/ {here = 1} here && /^```console/ {inside = 1; next} inside && /^```/ {exit} inside' README.md)
test -n "$lines"
export PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL-https://download.pytorch.org/whl/cpu}
while IFS= read -r line; do
  echo "+ $line"
  bash -euc "$line" < /dev/null
done <<< "$lines"
for example in examples/*.py; do
  name=$(basename "$example" .py)
  # Parts of the others; ogbn_products downloads its graph; with_* need another library, which they name.
  case $name in compare | example_graphs | ogbn_products | with_*) continue ;; esac
  echo "+ $name on two processes"
  OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 "$example" --epochs 2 > /dev/null
done
echo "README's lines and all examples work"
