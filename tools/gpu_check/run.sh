#!/bin/sh
# Run one part of the checks on a machine with an NVIDIA GPU. Each part ends by itself within its minutes, prints each
# result when it is known, and appends it to a file: a part that is killed leaves what it had.
# Exit codes: 0 no check failed, 1 some did, 2 a wrong word, 3 no driver.
here=$(cd "$(dirname "$0")" && pwd)
results=${OUT:-$here/results}
python=${PYTHON:-python3}

usage() {
  cat <<END
usage: ./run PART [options]

  core        5 min  the device suite on the real driver, then figures beside the link and beside loops
  library     1 min  libtorpor_memory.so by itself, in any Python from 3.8 on; needs no GPU
  torch       4 min  torch over torpor: pools, captured graphs, freed memory, pinning beside captures and steps
  speed       5 min  GB/s of sleep and wake beside vLLM's cumem and torch_memory_saver, where they are found
  sanitizer   4 min  compute-sanitizer over the device suite, where it is found

Options of every part but the last: --minutes N; --json prints JSON lines. ./run PART --help shows the others.
Results: JSON lines in $results (\$OUT if it is set). torch and speed run \$PYTHON (now $python), which needs torch.
README.md says in which order to run the parts, and how to read them.
END
}

# The C++ programs have their libraries beside them; Python must not see these.
native() {
  LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$@"
}

# $1: whole minutes. Print them in seconds.
seconds_of() {
  case $1 in
    "" | 0 | *[!0-9]*) echo "error: --minutes is \"$1\"; use 1 or more" >&2; return 2 ;;
  esac
  echo $(($1 * 60))
}

# $1: seconds since when, $2: seconds in all. Print what is left, at least 1.
left() {
  rest=$(($1 + $2 - $(date +%s)))
  [ "$rest" -gt 1 ] && echo "$rest" || echo 1
}

about_the_machine() {
  { date -u; uname -srm; nvidia-smi; nvidia-smi -q | grep -iE "link gen|width|current|max" | head -20; lscpu
    cat /sys/kernel/mm/transparent_hugepage/enabled; grep -E "MemTotal|MemAvailable" /proc/meminfo; } \
    >"$results/machine.txt" 2>&1
}

# $1: check, $2: exit code of its program. Print its row, and append it.
suite_row() {
  verdict=failed
  seen="exit code $2"
  [ "$2" = 0 ] && verdict=passed
  [ "$2" = 124 ] || [ "$2" = 137 ] && seen="no end within its time"
  printf '{"check": "%s", "verdict": "%s", "seen": "%s"}\n' "$1" "$verdict" "$seen" >>"$results/$part.jsonl"
  echo "$verdict  $1; $seen" >&2
}

core() {
  seconds=300
  words=
  while [ $# -gt 0 ]; do
    case $1 in
      --help | -h) native "$here/gpu_check" --help; exit 0 ;;
      --minutes) seconds=$(seconds_of "$2") || exit 2; shift ;;
      --minutes=*) seconds=$(seconds_of "${1#*=}") || exit 2 ;;
      *) words="$words $1" ;;
    esac
    shift
  done
  begun=$(date +%s)
  echo "part core: at most $seconds s" >&2
  about_the_machine
  native timeout -k 5 "$(left "$begun" $((seconds / 3)))" "$here/cuda_device_test" >&2
  suite=$?
  suite_row "the suite that every device must pass" "$suite"
  # shellcheck disable=SC2086  # options of gpu_check have no spaces
  native timeout -k 5 "$(left "$begun" "$seconds")" "$here/gpu_check" $words \
    --seconds "$(left "$begun" $((seconds - 15)))" --out "$results/core.jsonl"
  figures=$?
  [ "$suite" = 0 ] || [ "$figures" != 0 ] && exit "$figures"
  exit 1
}

sanitizer() {
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -z "$tool" ]; then
    echo '{"check": "sanitizer", "verdict": "not here", "seen": "there is no compute-sanitizer"}' \
      | tee "$results/sanitizer.jsonl"
    exit 0
  fi
  echo "part sanitizer: at most 240 s" >&2
  native timeout -k 5 235 "$tool" --error-exitcode 1 "$here/cuda_device_test" --gtest_filter='Cuda/*' >&2
  code=$?
  suite_row "sanitizer" "$code"
  exit "$code"
}

part=$1
case $part in
  -h | --help | help) usage; exit 0 ;;
  "") usage >&2; exit 2 ;;
esac
shift
mkdir -p "$results" || exit 2
case $part in
  core | sanitizer) : >"$results/$part.jsonl"; "$part" "$@" ;;
  library | torch | speed) exec "$python" -u "$here/memory_checks.py" "$part" --out "$results/$part.jsonl" "$@" ;;
  *) echo "error: there is no part $part" >&2; usage >&2; exit 2 ;;
esac
