#!/usr/bin/env bash
# Applies the patch-set to a verl tree: scripts/apply.sh --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment ""
exec "$repository/.venv/bin/python" -m patchset apply "$@"
