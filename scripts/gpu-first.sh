#!/usr/bin/env bash
# The first nine minutes on a GPU machine without network, in the project's root: the most important part first, each with
# a limit of its own. What a part found is in $OUT (eight small files) as soon as it is known; a part that fails or runs out
# of time does not stop the next one. `make gpu-kit` puts this file into .kit/, next to the wheels that it installs.
#   usage: OUT=folder bash .kit/gpu-first.sh       REHEARSE=1: on the CPU with tiny shapes; LIMIT_S=540: of all parts
set -u
kit=$(cd "$(dirname "$0")" && pwd)
export OUT=${OUT:-/tmp/gpu-first}
mkdir -p "$OUT"
work=$(mktemp -d) started=$(date +%s)
trap 'rm -rf "$work"' EXIT
if [ -n "${REHEARSE:-}" ]; then
  device=cpu quick=(--quick) demo=(--steps 4) bccd=(--steps 2 --batch-size 4 --image-size 128 128)
  limit=${LIMIT_S:-5400} factor=10 workers=0
else
  device=cuda quick=() demo=() bccd=(--max-time 1.6min)
  limit=${LIMIT_S:-540} factor=1 workers=6
fi

say() { echo "[$(($(date +%s) - started)) s] $*" | tee -a "$OUT/summary.txt"; }

# part NAME SECONDS COMMAND…: runs it within its limit and what is left of the whole.
part() {
  local name=$1 most=$(($2 * factor)) left=$((limit - ($(date +%s) - started))) code began=$SECONDS
  shift 2
  [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 10 ]; then
    say "$name: no time was left"
    return
  fi
  echo "== $name: $*" >> "$OUT/log.txt"
  timeout -k 10 "$most" "$@" > "$work/part.log" 2>&1
  code=$?
  cat "$work/part.log" >> "$OUT/log.txt"
  tail -n 12 "$work/part.log"
  [ "$code" = 124 ] && code="124, ended at its limit of $most s"
  say "$name: exit code $code, $((SECONDS - began)) s"
}

# A throw-away environment on top of the machine's Python, which may be a virtual environment itself: --system-site-packages
# would skip that one, so its folders are added by name.
install() {
  python3 -m venv --without-pip "$work/venv" || return
  local site
  site=$("$work/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])') || return
  python3 -c 'import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]' \
    > "$site/machine.pth" || return
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$kit"/wheels/*.whl
}
install || { say "the wheels cannot be installed"; exit 1; }
export PATH="$work/venv/bin:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HOME=${HOME:-$work}
export STOKER_CACHE_DIR="$work/cache" TORCHINDUCTOR_CACHE_DIR="$work/compiled"
say "$(python3 -c 'import platform, torch, torchvision
print("Python", platform.python_version(), "torch", torch.__version__, "torchvision", torchvision.__version__,
      torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", torch.cuda.is_available() and torch.version.cuda)')"
command -v nvidia-smi > /dev/null && say "$(nvidia-smi --query-gpu=driver_version,memory.total,clocks.max.sm --format=csv,noheader 2>&1 | head -1)"

headline=retinanet_resnet50_fpn
models=(ember_n faster_rcnn_resnet50_fpn retinanet_resnext50_32x4d_fpn ember_s ember_m)
gpu() { echo "python3 benchmarks/gpu.py --device $device --json $OUT/$1.json --minutes $(awk "BEGIN { print $2 * $factor / 60 }")"; }
measure() { # NAME SECONDS options of gpu.py…; it ends by itself, shortly before its limit
  local name=$1 most=$2
  shift 2
  # shellcheck disable=SC2046
  part "$name" $((most + 5)) $(gpu "gpu-$name" "$most") "${quick[@]}" "$@"
}
alone=(tests/gpu/test_nvml.py tests/gpu/test_ledger.py) # they measure the GPU's load or time
together=()
for file in tests/gpu/test_*.py; do [[ " ${alone[*]} " == *" $file "* ]] || together+=("$file"); done
pytest=(python3 -m pytest -v --durations=5 -p no:cacheprovider)

measure headline 130 --only $headline --how eager compiled
part tests 70 "${pytest[@]}" -n $workers --dist worksteal "${together[@]}"
part tests-alone 30 "${pytest[@]}" "${alone[@]}"
part end-to-end 85 python3 benchmarks/end_to_end.py --device $device --json "$OUT/end-to-end.json" --runs 1 "${quick[@]}" \
  --only $headline ember_n
measure models 70 --only "${models[@]}" --how eager
part memory 10 python3 - "$OUT/gpu-headline.json" "$OUT/gpu-models.json" << 'PY'
import json
import pathlib
import sys

for path in map(pathlib.Path, sys.argv[1:]):
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        if "batch_size" in row:
            names = ("predicted GiB", "prediction error", "peak GiB", "reserved GiB", "compiled peak GiB")
            print(row["what"], {name: row.get(name) for name in names if name in row})
PY
measure profile 30 --only $headline --how profile
part demo 40 python3 -m stoker train demo --device $device --run-dir "$work/demo" "${demo[@]}"
part why-demo 10 python3 -m stoker why "$work/demo"
[ -d "$kit/bccd" ] && part bccd 125 python3 -m stoker train "$kit/bccd" --model ember_s --weights none --device $device \
  --run-dir "$work/bccd" "${bccd[@]}"
[ -d "$work/bccd" ] && part why-bccd 10 python3 -m stoker why "$work/bccd"
measure graph 40 --only $headline --how graph
# What is left of the time.
measure models-compiled 240 --only "${models[@]}" --how compiled
say "done"
