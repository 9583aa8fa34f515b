#!/usr/bin/env bash
# Installs on a GPU machine without a network what docker/offline_wheels.sh put into a folder, and runs nothing else.
#
#   docker/install_offline.sh wheels                       into the environment of python3
#   GPULOAD_PYTHON=/opt/venv/bin/python docker/install_offline.sh wheels
#   docker/install_offline.sh --target DIR wheels          into DIR, beside what is there: then export PYTHONPATH=DIR
#
# What is there already in a version that will do stays as it is, torch and CuPy above all. gpuload itself is not
# installed: the tests and benchmarks run from the checkout, with
#
#   make test-gpu GPULOAD_PYTHON=python3
#   make bench-gpu GPULOAD_PYTHON=python3
set -euo pipefail

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; }

here=$(cd "$(dirname "$0")" && pwd)
target='' folder=
while [ $# -gt 0 ]; do
    case $1 in
        --target)
            target=${2:?--target: name the folder to install into}
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*)
            echo "install_offline.sh: unknown option $1" >&2
            usage >&2
            exit 2
            ;;
        *) folder=$1 ;;
    esac
    shift
done
if [ ! -f "$folder/requirements.txt" ]; then
    echo "install_offline.sh: ${folder:-no folder named}: expected a folder that docker/offline_wheels.sh made" >&2
    exit 2
fi
python=${GPULOAD_PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    echo "install_offline.sh: $python is no Python 3.12, for which the wheels are; set GPULOAD_PYTHON to one" >&2
    exit 1
fi

if [ -n "$target" ]; then
    mkdir -p "$(dirname "$target")"
    target=$(realpath -m "$target")
    export PYTHONPATH="$target${PYTHONPATH:+:$PYTHONPATH}" # what is in there is there
fi
wheels=$("$python" "$here/offline.py" missing "$folder")
if [ -z "$wheels" ]; then
    echo "nothing to install"
    exit 0
fi
mapfile -t wheels <<<"$wheels"
# No dependencies: what is missing was worked out, and pip would want the CUDA toolkit as packages where it is not.
install=("$python" -m pip install --no-index --no-deps --disable-pip-version-check)
if [ -z "$target" ]; then
    "${install[@]}" "${wheels[@]}"
    exit 0
fi
# Into a folder of its own, and then beside what is there: pip leaves out any folder that the target has already, and
# several packages share `nvidia`. If pip fails, the target is as it was.
fresh=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$fresh"' EXIT
"${install[@]}" --target "$fresh" "${wheels[@]}"
"$python" "$here/offline.py" merge "$fresh" "$target"
