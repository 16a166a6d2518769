"""Pages for people: one document, and the policy that allows its script alone."""

from __future__ import annotations

import base64
import hashlib
from typing import NamedTuple


class HtmlPage(NamedTuple):
    """A document.

    Attributes:
        policy: The value of its header `content-security-policy`.
    """

    text: str
    policy: str


def html_page(
    template: str, style: str, script: str, *, has_server: bool = True, has_files: bool = False,
    has_worklet: bool = False,
) -> HtmlPage:  # fmt: skip
    """Puts style and script where the template has `/* style */` and `/* script */`.

    The policy allows them by their hashes, and connections to the server that the page comes from. A template with
    `/* policy */` in a `meta` element keeps the policy as a file.

    `has_server`: Whether it may connect to its server; a page that is made as a file has none.
    `has_files`: Whether it shows pictures, and plays sounds, that its user gives it.
    `has_worklet`: Whether it makes scripts of its own text, as a module that reads a microphone has to be one.
    """
    script = f'"use strict";\n{script}'
    directives = [
        "default-src 'none'",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'" + (" blob:" if has_worklet else ""),
        "connect-src 'self'" if has_server else "connect-src 'none'",
        "img-src blob: data:" if has_files else "img-src data:",
        *(["media-src blob: data:"] if has_files else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    text = template.replace("/* policy */", "; ".join(directives), 1)
    text = text.replace("/* style */", style, 1).replace("/* script */", script, 1)
    return HtmlPage(text, "; ".join([*directives, "frame-ancestors 'none'"]))  # a header alone may forbid frames


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
