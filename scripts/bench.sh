#!/usr/bin/env bash
# Compares a pristine and a patched tree of one pin in one run: scripts/bench.sh --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment "[test]"
exec "$repository/.venv/bin/python" -m patchset bench "$@"
