#!/usr/bin/env bash
# Makes a folder of wheels for a GPU machine without a network. Run it on a machine with one, carry the folder and the
# checkout over, and run docker/install_offline.sh there.
#
#   docker/offline_wheels.sh wheels                          what `make test-gpu` needs, without DALI
#   docker/offline_wheels.sh --with-dali wheels              and DALI, for pipelines/ and the DALI front
#   docker/offline_wheels.sh --with-rivals wheels            and the loaders that the benchmarks compare with
#   docker/offline_wheels.sh --machine aarch64 wheels        for Grace (GH200, GB200) in place of x86-64
#   docker/offline_wheels.sh --present present.txt wheels    leaves out just what the GPU machine has, by a list made
#                                                            there: python3 -m pip list --format=freeze > present.txt
#
# The GPU machine: Linux on x86-64 or aarch64, glibc 2.28 or newer, Python 3.12, torch and CuPy 14.1.1 or newer for
# CUDA 13. Without --present these two and the CUDA toolkit's packages are left out; torch always is. PYTHON=... names
# the interpreter that runs pip here. Let it be a 3.12, as it is where there is one: pip goes by its own where a package
# depends on the version of Python, and --with-rivals needs one.
set -euo pipefail

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; }

here=$(cd "$(dirname "$0")" && pwd)
machine=x86_64 with=() present=() folder=
while [ $# -gt 0 ]; do
    case $1 in
        --with-dali | --with-rivals) with+=("$1") ;;
        --present)
            present=(--present "${2:?--present: name the list of packages of the GPU machine}")
            shift
            ;;
        --machine)
            machine=${2:?--machine: name the kind of the GPU machine, x86_64 or aarch64}
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*)
            echo "offline_wheels.sh: unknown option $1" >&2
            usage >&2
            exit 2
            ;;
        *) folder=$1 ;;
    esac
    shift
done
if [ -z "$folder" ]; then
    echo "offline_wheels.sh: name the folder that the wheels go into" >&2
    usage >&2
    exit 2
fi
if [ "$machine" != x86_64 ] && [ "$machine" != aarch64 ]; then
    echo "offline_wheels.sh: --machine $machine: expected x86_64 or aarch64, as 'uname -m' prints it there" >&2
    exit 2
fi
if [ -n "$(find "$folder" -mindepth 1 -print -quit 2>/dev/null)" ]; then
    echo "offline_wheels.sh: $folder is not empty; two versions of a package in it would not go together" >&2
    exit 2
fi
python=${PYTHON:-$(python3.12 --version >/dev/null 2>&1 && echo python3.12 || echo python3)}

# pip takes a tag for just what it says, so every glibc up to 2.28 is named.
target=(--python-version 3.12 --implementation cp --only-binary=:all:)
for tag in manylinux1 manylinux2010 manylinux2014 $(printf 'manylinux_2_%d ' {5..28}); do
    target+=(--platform "${tag}_$machine")
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" "$here/offline.py" requirements --machine "$machine" ${with[@]+"${with[@]}"} >"$work/requirements.txt"
echo "working out a set of packages that go together" >&2
"$python" -m pip install --no-input --quiet --dry-run --ignore-installed --report "$work/report.json" \
    --target "$work/none" "${target[@]}" --requirement "$work/requirements.txt"
mkdir -p "$folder"
"$python" "$here/offline.py" choose --machine "$machine" "$work/report.json" "$folder" \
    ${with[@]+"${with[@]}"} ${present[@]+"${present[@]}"} >"$work/chosen.txt"
"$python" -m pip download --no-input --quiet --no-deps --dest "$folder" "${target[@]}" --requirement "$work/chosen.txt"

echo "in $folder, in MiB:"
du --apparent-size --block-size=1M "$folder"/*.whl | sort -rn | sed "s|$folder/||"
du --apparent-size --block-size=1M --summarize "$folder"
