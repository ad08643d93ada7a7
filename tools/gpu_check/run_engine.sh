#!/bin/sh
# The checks of an engine, with the vLLM and the torpor of this folder and the torch of $PYTHON (python3). Options and
# exit codes: --help.
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PYTHONPATH="$here/torpor:$here/packages:$here/vllm${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "${PYTHON:-python3}" -u "$here/checks/engine_checks.py" --model "$here/model" "$@"
