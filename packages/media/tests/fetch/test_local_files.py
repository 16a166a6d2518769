"""Local files: below one folder, without following a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmstack_media.fetch.local_files import read_local
from llmstack_types import InvalidRequestError

CONTENT = b"a picture"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "in ner").mkdir(parents=True)
    (folder / "a.png").write_bytes(CONTENT)
    (folder / "in ner" / "b.png").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-of-others").mkdir()
    (tmp_path / "media-of-others" / "c.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret")
    (folder / "fine-link.png").symlink_to(folder / "a.png")
    (folder / "linked").symlink_to(tmp_path / "media-of-others")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("path", ["a.png", "in%20ner/b.png", "./a.png", "in%20ner//b.png"])
def test_files_below_the_folder_are_read(folder: Path, path: str) -> None:
    for host in ("", "localhost"):
        assert read_local(f"file://{host}{folder}/{path}", folder, 100) == CONTENT


@pytest.mark.parametrize(
    "path",
    [
        "../secret", "%2e%2e/secret", "in%20ner/../../secret", "link.png", "fine-link.png", "linked/c.png", "pipe", "",
        "in%20ner", "missing", "a.png/x", "x%00", "/etc/passwd", "a" * 300, "/".join("a" * 70),
    ],
)  # fmt: skip
def test_nothing_else_is(folder: Path, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_local(f"file://{folder}/{path}", folder, 100)
    assert caught.value.code in ("media_url_not_allowed", "media_fetch_failed")
    assert str(folder) not in caught.value.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file://other/x", "file:a.png", "file:", "file:///"])
def test_other_places_are_refused(folder: Path, url: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_local(url, folder, 100)


def test_a_folder_beside_whose_name_begins_alike_is_not_below(folder: Path) -> None:
    with pytest.raises(InvalidRequestError):
        read_local(f"file://{folder}-of-others/c.png", folder, 100)


def test_without_a_folder_nothing_is_read_and_a_large_file_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequestError):
        read_local(f"file://{folder}/a.png", None, 100)
    with pytest.raises(InvalidRequestError) as caught:
        read_local(f"file://{folder}/a.png", folder, len(CONTENT) - 1)
    assert caught.value.code == "image_too_large"
