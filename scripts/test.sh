#!/usr/bin/env bash
# Proves the patch-set on every release pin: scripts/test.sh --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment "[test]"
exec "$repository/.venv/bin/python" -m patchset test "$@"
