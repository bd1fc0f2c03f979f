"""Getting a pin: what is refused, how it is told, and that nothing is left half-written."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile

import pytest

from patchset.errors import SourceUnavailable, UsageError
from patchset.target import pins
from patchset.target.pins import Pin, load_pins, unpack
from patchset.target.state import sha256


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of our own and a pip that has no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "cache" / "verl-patchset").mkdir(parents=True)
    return tmp_path / "cache" / "verl-patchset"


def archive(*members: tuple[str, str | None, bytes]) -> bytes:
    """A .tar.gz of (name, link target or None, content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, link, data in (("verl-9/verl/__init__.py", None, b""), *members):
            info = tarfile.TarInfo(name)
            if link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, link
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def offer(cache, data: bytes) -> Pin:
    (cache / "verl-9.tar.gz").write_bytes(data)
    return Pin("sdist", sha256=sha256(data))


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (("/etc/evil", None, b"x"), "holds /etc/evil, which leads out of the tree"),
        (("verl-9/../../evil", None, b"x"), "which leads out of the tree"),
        (("verl-9/verl/link", "/etc/passwd", b""), "links verl-9/verl/link out of the tree"),
        (("verl-9/verl/link", "../../../evil", b""), "links verl-9/verl/link out of the tree"),
    ],
)
def test_hostile_archives_are_refused(cache, tmp_path, member, says):
    pin = offer(cache, archive(member))
    with pytest.raises(SourceUnavailable, match=says):
        unpack("9", pin, tmp_path / "out" / "verl")
    assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_links_inside_the_tree_are_kept(cache, tmp_path):
    unpack("9", offer(cache, archive(("verl-9/a", "verl", b""), ("verl-9/a/b", None, b"fine"))), tmp_path / "out")
    assert (tmp_path / "out/verl/b").read_bytes() == b"fine"


def test_a_write_through_links_that_add_up_to_a_way_out_is_refused(cache, tmp_path):
    pin = offer(cache, archive(("verl-9/a", ".", b""), ("verl-9/a/b", "..", b""), ("verl-9/b/evil", None, b"x")))
    with pytest.raises(SourceUnavailable, match="writes verl-9/b/evil through a link"):
        unpack("9", pin, tmp_path / "out" / "verl")
    assert list((tmp_path / "out").iterdir()) == []


def test_devices_are_refused(cache, tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("verl-9/verl/pipe")
        info.type = tarfile.FIFOTYPE
        tar.addfile(info)
    with pytest.raises(SourceUnavailable, match="no plain file"):
        unpack("9", offer(cache, buffer.getvalue()), tmp_path / "out")


@pytest.mark.parametrize("keep", [10, 200])
def test_truncated_archives_are_refused(cache, tmp_path, keep):
    data = archive(("verl-9/verl/big", None, os.urandom(5000)))[:keep]
    with pytest.raises(SourceUnavailable, match="9: its archive is damaged"):
        unpack("9", offer(cache, data), tmp_path / "out" / "verl")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_archive_without_verl_is_refused(cache, tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("other-1/README"))
    with pytest.raises(SourceUnavailable, match="holds no verl/ package"):
        unpack("9", offer(cache, buffer.getvalue()), tmp_path / "out")


def test_a_wrong_hash_is_told_with_pin_and_both_digests(cache, tmp_path, monkeypatch):
    served = archive(("verl-9/more", None, b"tampered"))

    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        with open(f"{folder}/verl-9.tar.gz", "wb") as file:
            file.write(served)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pins.subprocess, "run", download)
    with pytest.raises(SourceUnavailable) as told:
        unpack("9", Pin("sdist", sha256="0" * 64), tmp_path / "out")
    assert str(told.value).startswith(f"9: the download has sha256 {sha256(served)}, ci/pins.toml says {'0' * 64}")
    assert not (tmp_path / "out").exists()
    assert list(cache.iterdir()) == []


def test_a_damaged_cache_is_not_trusted(cache, tmp_path):
    (cache / "verl-9.tar.gz").write_bytes(b"rotten")
    with pytest.raises(SourceUnavailable, match="pip cannot download verl==9"):
        unpack("9", Pin("sdist", sha256="0" * 64), tmp_path / "out")


def test_no_network_is_one_line_that_says_what_to_do(cache, cli, tmp_path):
    status, _, err = cli("apply", "--out", tmp_path / "out")
    assert status == 3
    assert err.startswith("error: 0.9.1: pip cannot download verl==0.9.1; check the network, or put its sdist at ")
    assert not (tmp_path / "out").exists()
    status, out, _ = cli("apply", "--out", tmp_path / "out", "--json")
    assert json.loads(out)["exit_status"] == 3


def test_a_git_pin_needs_a_clone_that_has_it(cli, tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_UPSTREAM", raising=False)
    status, _, err = cli("apply", "--pin", "before-7358", "--out", tmp_path / "out")
    assert status == 3
    assert "give a clone with --upstream" in err
    subprocess.run(["git", "init", "--quiet", tmp_path / "clone"], check=True)
    status, _, err = cli("apply", "--pin", "before-7358", "--out", tmp_path / "out", "--upstream", tmp_path / "clone")
    assert status == 3
    assert "is no clone that has 04f25bb4326f" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('default = "1"\n[pins."1"]\nsource = "sdist"\n', "1 needs sha256"),
        ('default = "1"\n[pins."1"]\nsource = "git"\n', "1 needs commit"),
        ('default = "2"\n[pins."1"]\nsource = "git"\ncommit = "a"\n', "'2' is no pin"),
        ('default = "1"\n[pins."1"]\nsource = "ftp"\n', "Invalid enum value 'ftp'"),
        ('default = "1"\n[pins."1"]\nsource = "git"\ncommit = "a"\nhash = "b"\n', "unknown field `hash`"),
        ('default = "../x"\n[pins."../x"]\nsource = "git"\ncommit = "a"\n', "cannot name a folder"),
        ("default = ", "pins.toml: "),
    ],
)
def test_a_bad_pins_file_is_told(tmp_path, text, says):
    (tmp_path / "pins.toml").write_text(text)
    with pytest.raises(UsageError, match=says):
        load_pins(tmp_path / "pins.toml")
