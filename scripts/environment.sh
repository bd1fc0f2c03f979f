# Makes .venv and installs what a script needs, once for each state of pyproject.toml. Sourced, not run.
#   PYTHON   the interpreter to make .venv with (default: python3)

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ensure_environment EXTRA: EXTRA is "" for the engine alone, "[test]" for everything that the tests need
ensure_environment() {
    local extra=$1 python=${PYTHON:-python3} venv=$repository/.venv stamp
    stamp=$venv/.installed${extra//[^a-z]/-}-$(cksum "$repository/pyproject.toml" | cut -d' ' -f1)
    if [ -e "$stamp" ]; then return; fi
    if [ ! -x "$venv/bin/python" ]; then
        if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "error: $python is no Python 3.10 to 3.13; set PYTHON to one that is" >&2
            exit 2
        fi
        echo "making $venv" >&2
        "$python" -m venv "$venv" || { echo "error: $python cannot make a virtual environment in $venv" >&2; exit 2; }
    fi
    echo "installing verl-thd-patchset$extra into $venv" >&2
    if ! "$venv/bin/python" -m pip install -qq --disable-pip-version-check --editable "$repository$extra" >&2; then
        echo "error: pip cannot install what pyproject.toml names, for the reason above; mend it and run this again" >&2
        exit 3
    fi
    rm -f "$venv"/.installed"${extra//[^a-z]/-}"-[0-9]*
    touch "$stamp"
}
