#!/usr/bin/env bash
# Runs a tree's Megatron engine on this CPU and compares it with references: scripts/verify_numerics.sh --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment "[test]"
exec "$repository/.venv/bin/python" -m patchset numerics "$@"
