"""Files that are no safetensors, and paths that are no files: each gets its own message, and nothing is unpickled."""

from __future__ import annotations

import os
import pickle
import shlex
import socket
import subprocess
import sys
import zipfile

import pytest

from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import HeaderError, UnsupportedFileError


def refused(path, kind):
    with pytest.raises(kind) as caught:
        read_checkpoint(path)
    assert type(caught.value) is kind
    return caught.value


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle", ".PTH"])
def test_pickles_are_refused_by_name(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"anything")
    error = refused(path, UnsupportedFileError)
    assert f"ends in {suffix.lower()}, which is a Python pickle" in error.found
    assert "weights_only=True" in error.hint
    assert "a safetensors or GGUF file" in error.expected


class Trap:
    def __reduce__(self):
        return os._exit, (3,)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_pickles_are_refused_by_content(tmp_path, protocol):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps({"weight": Trap()}, protocol=protocol))
    if protocol == 1:  # begins like text, so only the header's length gives it away
        assert "not a safetensors file, or a damaged one" in refused(path, HeaderError).found
    else:
        assert "not a safetensors file: a Python pickle" in refused(path, UnsupportedFileError).found


def test_zip_archives_are_refused_by_content(tmp_path):
    path = tmp_path / "model.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    error = refused(path, UnsupportedFileError)
    assert "not a safetensors file: a zip archive, as torch.save writes it" in error.found
    assert "Convert it" in error.hint
    assert error.hint.endswith(f" {tmp_path}/model.safetensors {tmp_path}/model-converted.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_the_command_that_the_hint_gives_converts_a_pickle(tmp_path, nested):
    torch = pytest.importorskip("torch")
    weight = torch.randn(3, 2)
    tensors = {"a": weight, "tied": weight, "transposed": weight.T, "step": 3}
    path = tmp_path / "it's $(a) model.ckpt"
    torch.save({"state_dict": tensors} if nested else tensors, path)
    _, command = refused(path, UnsupportedFileError).hint.splitlines()

    subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd="/", check=True)

    header = read_checkpoint(path.with_suffix(".safetensors")).headers[""]
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
        "a": (3, 2),
        "tied": (3, 2),
        "transposed": (2, 3),
    }


def test_gguf_under_another_name(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(100))
    assert refused(path, UnsupportedFileError).found == "not a safetensors file: GGUF, under a name that says otherwise"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_git_lfs_pointer(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12309866400\n")
    error = refused(path, HeaderError)
    kind = "JSON" if name.endswith(".json") else "safetensors"
    assert error.found.startswith(f"not a {kind} file: a git-lfs pointer")
    assert "git lfs pull" in error.hint


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("page", [b"<!DOCTYPE html><title>Sign in</title>", b"\n <html lang='en'><body>Error</body>"])
def test_a_web_page(tmp_path, name, page):
    path = tmp_path / name
    path.write_bytes(page)
    error = refused(path, HeaderError)
    kind = "JSON" if name.endswith(".json") else "safetensors"
    assert error.found.startswith(f"not a {kind} file: a web page")
    assert "Log in or accept the model's licence" in error.hint


def test_json_text(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"_class_name": "Model", "weight_map": {}}')
    error = refused(path, HeaderError)
    assert error.found == "not a safetensors file: JSON text"
    assert ".safetensors.index.json" in error.hint


def test_a_download_that_never_began(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(5000))
    error = refused(path, HeaderError)
    assert error.found == "not a safetensors file: it begins with 512 zero bytes"
    assert "An interrupted download" in error.hint


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
@pytest.mark.parametrize("text", ["Access denied", "\ufeff\nAccess denied: the tökens\texpired\n" + "x" * 505 + "é"])
def test_any_other_text(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    error = refused(path, HeaderError)
    kind = "GGUF" if name.endswith("gguf") else "safetensors"
    assert error.found.startswith(f"not a {kind} file: text, which begins with 'Access denied")
    assert "it may say why there are no weights" in error.hint
    assert "a safetensors or GGUF file" in error.expected


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"Access\0denied" * 9)
    assert refused(path, HeaderError).found.startswith("not a safetensors file, or a damaged one: the first 8 bytes")


def test_a_missing_path(tmp_path):
    error = refused(tmp_path / "none" / "model.safetensors", HeaderError)
    assert error.found == "there is no such file or folder"
    assert "has to be downloaded first" in error.hint


def test_a_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file" / "model", HeaderError).found == "there is no such file or folder"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_path_that_can_not_be(tmp_path, name):
    error = refused(tmp_path / name, HeaderError)
    assert "it can't be read: " in error.found
    assert error.hint == "Check the path and the disk."


@pytest.mark.parametrize("of_folder", [False, True])
def test_a_broken_link(tmp_path, of_folder):
    path = tmp_path / "model.safetensors"
    path.symlink_to("../blobs/0123")
    error = refused(tmp_path if of_folder else path, HeaderError)
    assert error.found == "the link leads to ../blobs/0123, where there is nothing"
    assert error.path == str(path)


def test_a_link_to_itself(tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to(path)
    assert "it can't be read: " in refused(path, HeaderError).found


def test_a_folder_that_is_named_like_a_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.mkdir()
    assert refused(path, UnsupportedFileError).found == "the folder holds no model"
    error = refused(tmp_path, UnsupportedFileError)
    assert error.found == "this is a folder, not a file"
    assert error.path == str(path)


def test_pipes_sockets_and_devices_are_not_opened(tmp_path):
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        for path in (pipe, tmp_path / "s", "/dev/zero"):
            assert refused(path, UnsupportedFileError).found == "this is a pipe, a socket or a device, not a file"


@pytest.fixture
def ordinary_user(tmp_path):
    """Root may read everything, so a test that root runs becomes another user for its while."""
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        parent.chmod(parent.stat().st_mode | 0o055)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


@pytest.fixture
def forbidden(tmp_path):
    """A file and a folder that may not be read, and a folder with a link to that file."""
    paths = [tmp_path / "model.safetensors", tmp_path / "folder", tmp_path / "component"]
    paths[0].write_bytes(b"x" * 100)
    paths[1].mkdir()
    paths[2].mkdir()
    (paths[2] / "model.safetensors").symlink_to(paths[0])
    paths[0].chmod(0)
    paths[1].chmod(0)
    yield paths
    paths[1].chmod(0o755)


def test_files_and_folders_that_may_not_be_read(forbidden, ordinary_user):
    for path in forbidden:
        error = refused(path, HeaderError)
        assert error.found == "this user may not read it"
        assert "chmod" in error.hint
