#!/usr/bin/env bash
# Makes .kit/ (ignored by git): what a GPU machine without network needs besides this checkout. It has Python 3.12, torch
# 2.11, torchvision and common packages; .kit/ has the wheels that it lacks, a small data set where there is one, and
# gpu-first.sh, which is run there in the project's root (docs/benchmarks.md).       usage: make gpu-kit
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(msgspec cyclopts docstring-parser rich-rst simplejpeg tomli-w obstore google-crc32c tensorboardx plotly)
python=${PYTHON:-python3} data=${STOKER_TEST_DATA:-../shared/data}/bccd/BCCD

rm -rf .kit/wheels .kit/bccd  # compiled programs that came back from a machine stay: .kit/cache.tar.gz
mkdir -p .kit/wheels
for name in "${packages[@]}"; do  # the version and its hashes
  awk -v name="$name==" 'index($0, name) == 1 { found = 1 } found { print } found && !/\\$/ { exit }' requirements.lock \
    > .kit/one.txt
  [ -s .kit/one.txt ] || { echo "not in requirements.lock: $name" >&2; exit 1; }
  cat .kit/one.txt >> .kit/requirements.txt
done
platforms=()
for system in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1 linux; do
  platforms+=(--platform "${system}_x86_64")
done
"$python" -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary=:all: \
  --python-version 3.12 --implementation cp "${platforms[@]}" --dest .kit/wheels -r .kit/requirements.txt
rm .kit/one.txt .kit/requirements.txt
[ -d "$data" ] && cp -rL "$data" .kit/bccd && chmod -R u+w .kit/bccd
cp scripts/gpu-first.sh .kit/
size=$(du -sm --exclude=cache .kit | cut -f1)
echo ".kit: ${#packages[@]} wheels, data: $([ -d .kit/bccd ] && echo BCCD || echo none), $size MiB"
[ "$size" -lt 46 ] || { echo ".kit is too large: at most 46 MiB travel to the machine" >&2; exit 1; }
