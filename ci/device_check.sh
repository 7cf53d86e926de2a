#!/usr/bin/env bash
# Check a built wheel on one GPU, over the torch that is installed there, and measure it.
#
# Usage: ci/device_check.sh --out DIR [--wheel PATH]
#
# Needs no network and no compiler; PYTHON names an interpreter with torch, numpy, pytest, click,
# jinja2 and packaging (default: python3). Leaves in DIR: gate.log, evidence.tar.gz, gefen.txt,
# device.json. The exit status is that of the first step that failed.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
wheel=$root/dist
out=

usage() {
    echo "usage: ci/device_check.sh --out DIR [--wheel PATH]" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
        --out) out=$2 ;;
        --wheel) wheel=$2 ;;
        *) usage ;;
    esac
    shift 2
done
[ -n "$out" ] || usage
mkdir -p "$out"
out=$(cd "$out" && pwd)
wheel=$(cd "$(dirname "$wheel")" && pwd)/$(basename "$wheel")
[ -d "$wheel" ] && wheel=$(find "$wheel" -name 'gefen_cuda-*.whl' | sort | tail -n 1)
[ -f "$wheel" ] || { echo "device_check: no wheel; build one: ./ci/nox -s build" >&2; exit 3; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/evidence"
status=0
failed() {
    [ "$status" -ne 0 ] || status=$1
}

cd "$root"
site=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
timeout 240 "$python" -Bm gate run --wheel "$wheel" --profile gpu --site "$site" \
    --evidence "$scratch/evidence" --timeout 150 2>&1 | tee "$out/gate.log" || failed $?
tar -czf "$out/evidence.tar.gz" -C "$scratch" evidence || failed $?

"$python" -m pip install --quiet --no-index --no-deps --target "$scratch/site" "$wheel"
cd "$scratch"
export PYTHONPATH=$scratch/site
"$python" -m gefen | tee "$out/gefen.txt" || failed $?
timeout 180 "$python" "$root/benchmarks/device.py" --out "$out/device.json" || failed $?
exit "$status"
