#!/usr/bin/env bash
# One of three commands, of at most nine minutes each, for a GPU machine without network that is at hand for a short while,
# run in the project's root: A the step of RetinaNet-R50, B the loader in the loop and other models, C tests and trainings
# (docs/benchmarks.md). What is measured is appended to $OUT/A.jsonl at once, all output to $OUT/A.log. `make gpu-kit` puts
# this file into .kit/, next to the wheels that it installs. Compiled programs and the environment stay in .kit/cache, for
# the next command on the same machine.
#   usage: OUT=folder bash .kit/gpu-first.sh A|B|C [--only TEXT …]      --only: parts with one of these in their names
#   REHEARSE=1: on the CPU with tiny shapes; LIMIT_S=540: of it all
set -u
case "${1:-}" in A | B | C) ;; *) echo "usage: OUT=folder bash $0 A|B|C" >&2; exit 2 ;; esac
kit=$(cd "$(dirname "$0")" && pwd)
cache=$kit/cache OUT=${OUT:-/tmp/gpu-first}
mkdir -p "$OUT" "$cache"
ulimit -c 0 # a part that hangs is ended by SIGABRT, which would write its memory to the disk
if [ -n "${REHEARSE:-}" ]; then
  more=(--device cpu) limit=${LIMIT_S:-5400}
else
  more=(--device cuda) limit=${LIMIT_S:-540}
fi

# An environment on top of the machine's Python, which may be a virtual environment itself: --system-site-packages would
# skip that one, so its folders are added by name.
install() {
  local site
  [ -e "$cache/venv/.ready" ] && return
  rm -rf "$cache/venv"
  python3 -m venv --without-pip "$cache/venv" || return
  site=$("$cache/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])') || return
  python3 -c 'import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]' \
    > "$site/machine.pth" || return
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$kit"/wheels/*.whl || return
  cp "$site/plotly/package_data/plotly.min.js" packages/stoker-watch/stoker_watch/report/page/ && touch "$cache/venv/.ready"
}
if [ -f "$kit/cache.tar.gz" ] && [ ! -d "$cache/compiled" ]; then # of an earlier machine
  tar -xzf "$kit/cache.tar.gz" -C "$cache"
fi
[ -d "$cache/compiled" ] && echo "compiled programs of an earlier command: $(du -sm "$cache/compiled" | cut -f1) MiB"
install || { echo "the wheels cannot be installed" | tee -a "$OUT/$1.log" >&2; exit 1; }
export PATH="$cache/venv/bin:$PATH" PYTHONPATH="$PWD:$PWD/packages/stoker-watch:$PWD/packages/stoker${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HOME=${HOME:-$cache}
export STOKER_CACHE_DIR="$cache/stoker" STOKER_KIT_CACHE="$cache"
export TORCHINDUCTOR_CACHE_DIR="$cache/compiled" TRITON_CACHE_DIR="$cache/triton" CUDA_CACHE_PATH="$cache/cuda"
echo "environment: $SECONDS s"
exec python3 -m benchmarks gpu --kit "$1" --lines "$OUT/$1.jsonl" --bccd "$kit/bccd" "${more[@]}" \
  --minutes "$(awk "BEGIN { print ($limit - $SECONDS) / 60 }")" "${@:2}"
