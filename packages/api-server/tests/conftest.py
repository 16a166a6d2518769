"""What several tests need: certificates, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

MakeCertificate = Callable[[str], tuple[str, str]]


@pytest.fixture(autouse=True)
def _no_talking_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that name no model get the embedded one, whatever is installed here."""
    monkeypatch.setattr("llmstack_model_files.is_packaged_model_installed", lambda name: False)


@pytest.fixture
def make_certificate(tmp_path: Path) -> MakeCertificate:
    """Makes a self-signed certificate for 127.0.0.1, by name, and its key; two paths."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")

    def make(name: str) -> tuple[str, str]:
        certificate, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}",
             "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip
        return str(certificate), str(key)

    return make
